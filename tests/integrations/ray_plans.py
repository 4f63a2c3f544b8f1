"""One Ray Train run that trains the same model under several plans: `python -m tests.integrations.ray_plans RESULTS`.

Each worker writes its losses and the ledger's totals to the folder RESULTS. Two workers also run the training of
examples/cluster/train.py there, without interruption.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import checkpoint
from tests.examples.launching import CLUSTER

PLANS = (None, "ddp()", "quantized_ddp(bits=4)", "diloco(period=4)")
STEPS = 8
EXAMPLE_PLAN, EXAMPLE_STEPS = "diloco(period=8)", 40


def model_of_the_tests() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8))


def train(plan: str | None) -> dict[str, Any]:
    model = ray.train.torch.prepare_model(model_of_the_tests())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = None if plan is None else laconic.attach(laconic.plan(plan), model, optimizer)
    worker, losses = ray.train.get_context().get_world_rank(), []
    draw = torch.Generator().manual_seed(1 + worker)
    for _ in range(STEPS):
        x = torch.randn(16, 32, generator=draw)
        loss = nn.functional.mse_loss(model(x), x[:, :8])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found: dict[str, Any] = {"losses": losses, "ddp": isinstance(model, DistributedDataParallel)}
    if session is not None:
        found["phases"] = {name: total.wire_bytes for name, total in session.ledger.totals(by="phase").items()}
        found["steps"] = sorted({entry.step for entry in session.ledger.entries} - {0})  # 0: the handshake
        session.detach()
    return found


def train_the_example(folder: str) -> None:
    sys.path.insert(0, str(CLUSTER))
    import train as example  # type: ignore[import-not-found]

    os.environ["LACONIC_PLAN"] = EXAMPLE_PLAN
    example.train(
        EXAMPLE_STEPS,
        EXAMPLE_STEPS,
        wrap=ray.train.torch.prepare_model,
        load=lambda: None,
        save=lambda state, session, loss: checkpoint.save(folder, state, step=session.step),
        stop_on_sigterm=False,
    )


def work(config: dict[str, str]) -> None:
    results = {str(plan): train(plan) for plan in PLANS}
    context = ray.train.get_context()
    if context.get_world_size() == 2:
        train_the_example(config["results"])
    name = f"{context.get_world_size()}-{context.get_world_rank()}.json"
    Path(config["results"], name).write_text(json.dumps(results))


def main() -> None:
    results = sys.argv[1]
    ray.init()
    for workers in (2, 1):
        ray.train.torch.TorchTrainer(
            work,
            train_loop_config={"results": results},
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(name=f"plans-{workers}", storage_path=results),
        ).fit()


if __name__ == "__main__":
    main()
