"""A model sharded by FSDP2 under laconic: two replicas of two shards each. What differs from plain HSDP is marked.

Run it with `torchrun --nproc-per-node 4 examples/sharded.py`.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import laconic  # new

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 200

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
torch.manual_seed(0)
teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
blocks = [torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh()) for _ in range(2)]
model = torch.nn.Sequential(torch.nn.Linear(64, 256), *blocks, torch.nn.Linear(256, 1))
for block in blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
session = laconic.attach(laconic.plan_from_env(laconic.diloco(period=20)), model, optimizer)  # new

torch.manual_seed(1 + dist.get_rank())  # each worker draws its own data
for _ in range(STEPS):
    x = torch.randn(64, 64)
    with torch.no_grad():
        y = teacher(x)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if session.report(loss=loss, tokens=len(x)):  # new: true once `laconic compare` has seen enough
        break

if dist.get_rank() == 0:
    print(f"{session.plan}: loss {loss.item():.4f}, sent {session.ledger.payload_bytes:,} bytes to the other replica")
dist.destroy_process_group()
