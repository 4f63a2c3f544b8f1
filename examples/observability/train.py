"""A training with its metrics in TensorBoard and Prometheus: the lines for them are marked "new".

    LACONIC_PLAN="diloco(period=16, group=2)" torchrun --nproc-per-node 4 examples/observability/train.py

Needs `pip install "laconic[tensorboard,prometheus]"`. Worker n serves http://127.0.0.1:9464+n/metrics; `prometheus.yml`
scrapes four of them, and `grafana.json` is a dashboard for what they say (docs/metrics.md).
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.integrations.prometheus import PrometheusServer  # new
from laconic.integrations.tensorboard import TensorBoard  # new

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--log-dir", default="runs/example")
parser.add_argument("--port", type=int, default=9464)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.set_num_threads(1)
torch.manual_seed(0)
teacher = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
hidden = [torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 256), torch.nn.Tanh()]
model = DDP(torch.nn.Sequential(*hidden, torch.nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
held_out = torch.randn(1024, 64)
with torch.no_grad():
    expected = 10 * teacher(held_out)
torch.manual_seed(1 + dist.get_rank())  # each worker draws its own data

with laconic.attach(laconic.plan_from_env(), model, optimizer, guard="warn") as session:
    session.observe(TensorBoard(args.log_dir, every=10))  # new
    session.observe(PrometheusServer(args.port, all_workers=True))  # new
    for step in range(1, args.steps + 1):
        x = torch.randn(32, 64)
        with torch.no_grad():
            y = 10 * teacher(x)
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        validation = None
        if step % 50 == 0:
            with torch.no_grad():
                validation = torch.nn.functional.mse_loss(model.module(held_out), expected)
        session.report(loss=loss, validation=validation)  # new
    if dist.get_rank() == 0:
        print(
            f"{session.plan!r}: step {session.step}, loss {loss.item():.4f}, sent {session.ledger.wire_bytes:,} bytes"
        )
dist.destroy_process_group()
