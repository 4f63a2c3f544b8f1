"""An elastic run, which continues when workers die or join. Host its store first: `python -m laconic.elastic`.

By hand, in any number of terminals, each with its own id:

    python examples/elastic.py 127.0.0.1:29400 --id 0

Or with torchrun's elastic agents, one on each machine, which restart workers that have died:

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-id demo \
        --rdzv-endpoint 127.0.0.1:29400 --rdzv-conf is_host=0 examples/elastic.py 127.0.0.1:29400

Kill any of these processes, and start it again.
"""

import argparse
import sys

import torch

import laconic
from laconic import elastic

parser = argparse.ArgumentParser()
parser.add_argument("store")
parser.add_argument("--id", help="needed by hand; torchrun provides one")
parser.add_argument("--least", type=int, default=1)
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--folder", default="elastic-run")
options = parser.parse_args()

torch.manual_seed(0)
teacher = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loss = torch.zeros(())

world = elastic.join(options.store, id=options.id, least=options.least)
session = laconic.attach(laconic.plan_from_env(laconic.diloco(period=20)), model, optimizer)
with elastic.Run(world, session, model, optimizer, folder=options.folder, save_every=10) as run:
    run.leave_on()  # at SIGTERM, which torchrun sends before it restarts workers: saves the last commit
    for step in run.steps(options.steps):
        with step:
            draw = torch.Generator().manual_seed(step.number * step.workers + step.worker)  # the batch of this step
            x = torch.randn(64, 64, generator=draw)
            with torch.no_grad():
                y = teacher(x)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if run.stopped:
        sys.exit(f"worker {world.id} left after step {session.step}; restarted, it continues from there")
    if run.worker == 0:
        print(f"step {session.step}, {run.workers} workers: loss {loss.item():.4f}")
