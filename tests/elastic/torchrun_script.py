"""A training script for torchrun's agents: `python -m tests.elastic.torchrun_script PORT LOGS TOTAL`.

Every process writes its own log, as those of `cluster.py` do, so a run can be compared with its replay.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic import elastic
from tests.elastic.cluster import write_log
from tests.elastic.replay import Line, gradient, optimizer_of


def train(port: int, logs: Path, total: int, log: Any) -> None:
    names = ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    log(started={name: os.environ[name] for name in names}, agent=os.getppid())
    world = elastic.join(
        f"127.0.0.1:{port}", least=1, expect=int(os.environ["WORLD_SIZE"]), heartbeat_timeout_s=1.0, wait_s=20
    )
    model = Line(1.0)
    optimizer = optimizer_of(model, momentum=0.5)
    session = laconic.attach(laconic.ddp(), model, optimizer, timeout_s=5.0)

    def committed(commit: elastic.Committed) -> None:
        log(commit=[commit.since, commit.step, list(commit.workers)])

    with elastic.Run(world, session, model, optimizer, folder=logs / "saved", save_every=5, on_commit=committed) as run:
        run.leave_on()
        for step in run.steps(total):
            with step:
                if (logs / "end").exists():
                    run.stop()
                (model.flat() * gradient(step.number, step.worker, step.workers)).sum().backward()
                time.sleep(0.02)
                optimizer.step()
                optimizer.zero_grad()
        if run.leaving:
            log(left=session.step)
        else:
            log(final=model.flat().tolist(), step=session.step, members=list(run.members))


def main() -> None:
    """Run a worker process to its end, and write a log of what it does."""
    port, logs, total = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with (logs / f"{os.environ['RANK']}-{os.getpid()}.jsonl").open("a", buffering=1) as file:
        write_log(file, lambda log: train(port, logs, total, log), pid=os.getpid())


if __name__ == "__main__":
    main()
