"""Your own DDP training with laconic: the lines that laconic needs are marked "new".

Run it with `torchrun --nproc-per-node 4 examples/own_script.py`, or compare plans on it over a slow link with
`laconic compare --script examples/own_script.py --link 50mbit`.
"""

import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic  # new

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200

dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 512), torch.nn.Tanh())
teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = DDP(torch.nn.Sequential(net, torch.nn.Linear(512, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = laconic.attach(laconic.plan_from_env(), model, optimizer)  # new

torch.manual_seed(1 + dist.get_rank())  # each worker draws its own data
for _ in range(STEPS):
    x = torch.randn(64, 64)
    with torch.no_grad():
        y = teacher(x)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if session.report(loss=loss, tokens=len(x)):  # new: True when `laconic compare` ends the run
        break

if dist.get_rank() == 0:
    print(f"{laconic.plan_from_env()}: loss {loss.item():.4f}, sent {session.ledger.payload_bytes:,} bytes")
dist.destroy_process_group()
