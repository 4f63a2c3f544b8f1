"""One worker of one run of `benchmarks/peers.py`: one training loop for all contestants, one clock, one byte counter.

    torchrun --nproc-per-node 2 benchmarks/contestants/worker.py FOLDER '{"name": "torch DDP", ...}'

Every few steps all workers stop the clock and validate the mean of their weights, over a group that is not on the link
under study. Worker 0 writes a line for each validation.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # an optimizer's first step would import it: a second that is not its own
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from contestants.contract import Host, Training
from contestants.listed import named
from laconic.tools.compare.reporter import control_group, interface_bytes, mean_of, mean_over
from laconic.tools.lab.script import lr_share
from laconic.tools.lab.tasks import Lab, Task, make_task, validation_loss
from laconic.tools.machine import usable_cores

POINTS = "points.jsonl"
TIMEOUT = timedelta(minutes=3)  # of one collective


@dataclass(frozen=True)
class Goal:
    """A run: the contestant, the seed, and when it ends."""

    name: str
    seed: int
    steps: int
    seconds: float
    until_loss: float


@dataclass(frozen=True)
class Point:
    """A validation: the means over all workers of their steps, seconds, losses and sent bytes so far."""

    step: float
    seconds: float
    loss: float
    sent_bytes: float
    ended: str = ""


def main(folder: Path, goal: Goal) -> None:
    """Train until the goal is reached, as one worker."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    control = control_group(dist.group.WORLD)
    assert control is not None, "there must be at least two workers"
    torch.set_num_threads(max(1, usable_cores() // dist.get_world_size()))
    settings = Lab(seed=goal.seed)
    task = make_task(settings)
    host = Host(dist.get_rank(), dist.get_world_size(), folder, control, settings, task.model)
    training = named(goal.name).build(host)
    with (folder / POINTS).open("a", buffering=1) if host.rank == 0 else nullcontext() as file:
        for point in run(host, task, training, goal):
            if file is not None:
                file.write(json.dumps(asdict(point)) + "\n")
    dist.barrier(control)  # all have the last point before any ends
    training.close()


def run(host: Host, task: Task, training: Training, goal: Goal):
    """Train, and yield a point after each validation. The last one says what ended the run."""
    share = task.validation[host.rank :: host.workers]
    dist.barrier(host.control)
    sent_before, began, paused_s = interface_bytes() or 0, time.perf_counter(), 0.0
    step, ended = 0, ""
    while not ended:
        step += 1
        training.step(task.draw(host.rank, step), host.settings.lr * lr_share(min(step, goal.steps), goal.steps))
        if not training.is_due(step):
            continue
        dist.barrier(host.control)  # to wait for the slowest worker is part of the training
        stopped = time.perf_counter()
        sent = (interface_bytes() or 0) - sent_before
        weights = [] if training.alone else [p.detach() for p in training.module.parameters()]
        with mean_of(weights, host.control):
            loss = validation_loss(training.module, share)
        means = mean_over(host.control, step, stopped - began - paused_s, loss, sent)
        ended = ending(Point(*means), goal)
        yield Point(*means, ended=ended)
        paused_s += time.perf_counter() - stopped


def ending(point: Point, goal: Goal) -> str:
    """What ends a run at a point, the same on all workers; "" if nothing does.

    >>> goal = Goal("torch DDP", seed=0, steps=300, seconds=100, until_loss=2.0)
    >>> ending(Point(10, 5.0, 2.5, 0), goal), ending(Point(10, 5.0, 2.0, 0), goal)
    ('', 'loss')
    """
    if point.loss <= goal.until_loss:
        return "loss"
    if point.seconds >= goal.seconds:
        return "seconds"
    return "steps" if point.step >= goal.steps else ""


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # libraries warn of each other
    main(Path(sys.argv[1]), Goal(**json.loads(sys.argv[2])))
    sys.stdout.flush()
    # A thread of gloo may release its last tensor only now, and abort an interpreter that shuts down (torch 2.13).
    os._exit(0)
