"""An ordinary DDP training script with three lines for laconic. `laconic compare` runs it like a user's own script.

    torchrun --nproc-per-node 2 -m laconic.tools.lab.script --steps 100

A plan that synchronises now and then leaves each worker with its own weights between two synchronisations. What is
validated is the mean of them; under `alone()` each worker's own, and the mean of the losses is reported. While training
goes on, each worker validates its share of the batches; at the end, all of them.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import laconic
from laconic.tools.lab.tasks import STEPS, Lab, Task, loss_of, make_task, validation_loss
from laconic.tools.machine import usable_cores

WARM_UP_STEPS = 20
LAST_LR_SHARE = 0.1
TIMEOUT = timedelta(minutes=5)  # of one collective


def main(arguments: Sequence[str]) -> None:
    """Train as one worker, in a new process group or in the one that exists."""
    lab, steps = parse(arguments)
    new_group = not dist.is_initialized()
    if new_group:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    torch.set_num_threads(max(1, usable_cores() // dist.get_world_size()))
    train(lab, steps, make_task(lab))
    if new_group:
        dist.destroy_process_group()


def train(lab: Lab, steps: int, task: Task) -> None:
    """The training loop."""
    worker, workers = dist.get_rank(), dist.get_world_size()
    share = task.validation[worker % len(task.validation) :: workers]
    first_loss = validation_loss(task.model, task.validation)
    model = DistributedDataParallel(task.model, bucket_cap_mb=lab.bucket_mb)
    optimizer = AdamW(model.parameters(), lr=lab.lr, betas=(0.9, 0.95), weight_decay=0.01)
    guards = [] if lab.guard == "off" else [laconic.Guard(lab.guard)]
    with laconic.attach(laconic.plan_from_env(), model, optimizer, observers=guards) as session:
        loss = torch.tensor(first_loss)
        session.report(loss=loss, validation=first_loss)  # before the first step
        for step in range(1, steps + 1):
            optimizer.param_groups[0]["lr"] = lab.lr * lr_share(step, steps)
            loss = loss_of(model, task.draw(worker, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.report(
                loss=loss, tokens=task.tokens_per_step, validation=partial(validation_loss, task.model, share)
            ):
                break
        # the final loss: every worker takes all batches
        session.report(loss=loss, validation=partial(validation_loss, task.model, task.validation))


def parse(arguments: Sequence[str]) -> tuple[Lab, int]:
    """Read the script's arguments: what to train, and for how many steps."""
    parser = argparse.ArgumentParser(prog="python -m laconic.tools.lab.script", description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    for field in fields(Lab):
        kind = Path if field.default is None else type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    given = vars(parser.parse_args(arguments))
    steps = given.pop("steps")
    return Lab(**given), steps


def lr_share(step: int, steps: int) -> float:
    """The share of the learning rate at a step, from 1: a linear warm-up, then a half cosine down to a tenth.

    >>> [round(lr_share(step, steps=100), 2) for step in (1, 20, 60, 100)]
    [0.05, 1.0, 0.55, 0.1]
    """
    warm_up = min(WARM_UP_STEPS, max(1, steps // 4))
    if step <= warm_up:
        return step / warm_up
    done = (step - warm_up) / (steps - warm_up)
    return LAST_LR_SHARE + (1 - LAST_LR_SHARE) * (1 + math.cos(math.pi * done)) / 2


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    # A thread of gloo may release its last tensor only now, and abort an interpreter that shuts down (torch 2.13).
    os._exit(0)
