"""What one worker does: an ordinary DDP training loop with one added line, `laconic.attach`.

Final losses are compared across plans, so it matters which model is meant when workers may differ. A plan
that averages now and then leaves each worker with its own weights between two rounds. Every worker
therefore evaluates the weights that it really holds, on the same validation batches, and the loss reported
is the mean over the workers. Where the workers agree, as after a round, that is simply the loss; where they
do not, no averaging that the plan did not ask for flatters it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import laconic
from laconic.lab.progress import Progress
from laconic.lab.settings import Settings, usable_cores
from laconic.lab.tasks import Task, loss_of, make_task, validation_loss

WARM_UP_STEPS = 20
LAST_LR_SHARE = 0.1
PATIENCE = timedelta(minutes=5)  # how long a worker waits for the others in one collective


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Bytes are those of one worker, tokens those of all (an image counts as one); seconds are of training alone,
    without start-up and evaluation.
    `sent_bytes` is what the worker handed to collectives, `wire_bytes` what these put on the network for it.
    """

    plan: str
    model: str
    parameters: int
    workers: int
    steps: int
    seconds: float
    talking_seconds: float
    tokens_per_s: float
    sent_bytes: int
    wire_bytes: int
    loss_start: float
    loss_final: float


def start_group() -> None:
    """Joins the group of workers whose address stands in the environment."""
    dist.init_process_group("gloo", timeout=PATIENCE)


def train(settings: Settings, report: Callable[[Progress], None]) -> Outcome:
    """Trains as one worker of the process group that is already there, and says how it went."""
    torch.set_num_threads(max(1, usable_cores() // settings.workers))
    task = make_task(settings)
    model = DistributedDataParallel(task.model, bucket_cap_mb=settings.bucket_mb)
    optimizer = AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    plan = laconic.plan(settings.plan)
    loss_start = _mean_over_workers(validation_loss(task.model, task.validation))
    with laconic.attach(plan, model, optimizer) as talk:
        seconds = _run_steps(settings, task, model, optimizer, talk.ledger, report)
        ledger = talk.ledger
    loss_final = _mean_over_workers(validation_loss(task.model, task.validation))
    return Outcome(
        plan=str(plan),
        model=settings.model,
        parameters=sum(p.numel() for p in task.model.parameters()),
        workers=settings.workers,
        steps=settings.steps,
        seconds=seconds,
        talking_seconds=ledger.seconds,
        tokens_per_s=settings.steps * task.tokens_per_step * settings.workers / seconds,
        sent_bytes=ledger.payload_bytes,
        wire_bytes=ledger.wire_bytes,
        loss_start=loss_start,
        loss_final=loss_final,
    )


def _run_steps(
    settings: Settings,
    task: Task,
    model: DistributedDataParallel,
    optimizer: Optimizer,
    ledger: laconic.Ledger,
    report: Callable[[Progress], None],
) -> float:
    """The training loop. Returns its seconds."""
    worker = dist.get_rank()
    began = time.perf_counter()
    seconds = 0.0
    for step in range(1, settings.steps + 1):
        _set_lr(optimizer, settings.lr * lr_share(step, settings.steps))
        loss = loss_of(model, task.draw(worker, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - began
        report(
            Progress(
                worker=worker,
                step=step,
                steps=settings.steps,
                loss=loss.item(),
                tokens_per_s=step * task.tokens_per_step / seconds,
                sent_bytes=ledger.payload_bytes,
                seconds=seconds,
            )
        )
    return seconds


def lr_share(step: int, steps: int) -> float:
    """The share of the learning rate at a step, from 1: a short ramp up, then half a cosine to a tenth.

    >>> [round(lr_share(step, steps=100), 2) for step in (1, 20, 60, 100)]
    [0.05, 1.0, 0.55, 0.1]
    """
    warm_up = min(WARM_UP_STEPS, max(1, steps // 4))
    if step <= warm_up:
        return step / warm_up
    way = (step - warm_up) / (steps - warm_up)
    return LAST_LR_SHARE + (1 - LAST_LR_SHARE) * (1 + math.cos(math.pi * way)) / 2


def _set_lr(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _mean_over_workers(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return _float(total / dist.get_world_size())


def _float(scalar: Tensor) -> float:
    return float(scalar.item())
