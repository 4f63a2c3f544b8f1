"""A training script for torchrun's agents, told apart by what it writes: `python -m tests.elastic.restarted PORT LOGS`.

Every process writes to a log of its own, as those of `chaos.py` do, and a run can be compared to its replay.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import laconic
from laconic import elastic
from tests.elastic.chaos import Line, gradient, optimizer_of


def train(port: int, logs: Path, total: int, say: Any) -> None:
    world = elastic.join(f"127.0.0.1:{port}", least=1, expect=int(os.environ["WORLD_SIZE"]), silence_s=1.0, wait_s=20)
    model = Line(1.0)
    optimizer = optimizer_of(model, momentum=0.5)
    session = laconic.attach(laconic.ddp(), model, optimizer, timeout_s=5.0)

    def committed(done: elastic.Committed) -> None:
        say(commit=[done.since, done.step, list(done.workers)])

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
        if run._leaving:
            say(left=session.step)
        else:
            say(final=model.flat().tolist(), step=session.step, members=list(run.members))


def main() -> None:
    """Run a worker process to its end, which is written to its log."""
    port, logs, total = int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    place = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")}
    with (logs / f"{os.environ['RANK']}-{os.getpid()}.jsonl").open("a", buffering=1) as log:

        def say(**what: Any) -> None:
            log.write(json.dumps({**what, "pid": os.getpid(), "at": time.time()}) + "\n")

        say(started=place, agent=os.getppid())
        try:
            train(port, logs, total, say)
        except BaseException as error:
            say(error=type(error).__name__, text=str(error), trace=traceback.format_exc())
            raise


if __name__ == "__main__":
    main()
