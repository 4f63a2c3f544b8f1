"""What one worker does: an ordinary DDP training loop with one added line, `laconic.session.session`.

Final losses are compared across plans, so it matters which model is meant when workers may differ. A plan
that averages now and then leaves each worker with its own weights between two rounds. Every worker
therefore evaluates the weights that it really holds, on the same validation batches, and the loss reported
is the mean over the workers. Where the workers agree, as after a round, that is simply the loss; where they
do not, no averaging that the plan did not ask for flatters it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import IO

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import laconic
from laconic.compare.lab.tasks import Task, loss_of, make_task, validation_loss
from laconic.compare.links import Link
from laconic.compare.reporting import Ending, Progress, Reporting, Watch, control_group
from laconic.compare.settings import Settings, usable_cores

WARM_UP_STEPS = 20
LAST_LR_SHARE = 0.1
PATIENCE = timedelta(minutes=5)  # how long a worker waits for the others in one collective


@dataclass(frozen=True)
class Outcome:
    """What a run came to.

    Bytes are those of one worker, tokens those of all (an image counts as one); seconds are of training alone,
    without start-up and evaluation.
    `sent_bytes` is what the worker handed to collectives, `wire_bytes` what these put on the network for it,
    `network_bytes` the same with the headers of gloo and TCP, and `interface_bytes` what the network card counted in
    the same time, where each worker has one of its own.
    `talking_seconds` is the time during which something was on its way, computing or not; `waiting_seconds` the part
    of it that went into waiting for slower workers. The losses are those of `loss_of`.
    With `clock` "computed", the link's seconds are computed from the bytes and the rest is measured.
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
    loss_of: str = "validation"
    ended: Ending = "steps"
    until_loss: float | None = None
    link: str | None = None
    clock: str = "measured"
    waiting_seconds: float | None = None
    network_bytes: int = 0
    interface_bytes: int | None = None
    level_bytes: dict[str, int] = field(default_factory=dict)
    uplink_bytes: dict[str, int] = field(default_factory=dict)
    wire_bytes_by_worker: tuple[int, ...] = ()
    interface_bytes_by_worker: tuple[int, ...] = ()
    curve: tuple["Point", ...] = ()

    @property
    def reached(self) -> bool:
        """Whether the run ended because it had reached the loss that it was to reach."""
        return self.ended == "loss"


@dataclass(frozen=True)
class Point:
    """One point of a run's curve: the smoothed training loss at a step, and what it had cost one worker by then."""

    step: int
    seconds: float
    loss: float
    wire_bytes: int


def start_group() -> None:
    """Joins the group of workers whose address stands in the environment."""
    dist.init_process_group("gloo", timeout=PATIENCE)


def train(
    settings: Settings,
    report: Callable[[Progress], None],
    computed: Link | None = None,
    seconds: IO[bytes] | None = None,
) -> Outcome:
    """Trains as one worker of the process group that is already there, and says how it went.

    With `computed`, the clock also counts what that link would take; `seconds` takes those of each collective.
    """
    torch.set_num_threads(max(1, usable_cores() // settings.workers))
    task = make_task(settings)
    control = control_group(dist.group.WORLD)
    model = DistributedDataParallel(task.model, bucket_cap_mb=settings.bucket_mb)
    optimizer = AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    plan = laconic.plan(settings.plan)
    loss_start = _mean_over_workers(validation_loss(task.model, task.validation), control)
    ledger = Watch(computed, seconds)
    with laconic.attach(plan, model, optimizer, ledger=ledger):
        reporting = Reporting(report, ledger, settings.goal, control)
        last = _run_steps(settings, task, model, optimizer, reporting)
    loss_final = _mean_over_workers(validation_loss(task.model, task.validation), control)
    return Outcome(
        plan=str(plan),
        model=settings.model,
        parameters=sum(p.numel() for p in task.model.parameters()),
        workers=settings.workers,
        steps=last.step,
        seconds=last.seconds,
        talking_seconds=last.talking_s,
        tokens_per_s=last.tokens_per_s * settings.workers,
        sent_bytes=last.sent_bytes,
        wire_bytes=last.wire_bytes,
        network_bytes=last.wire_bytes + last.framing_bytes,
        loss_start=loss_start,
        loss_final=loss_final,
        ended=last.ended,
        until_loss=settings.until_loss,
        level_bytes=last.level_bytes,
    )


def _run_steps(
    settings: Settings,
    task: Task,
    model: DistributedDataParallel,
    optimizer: Optimizer,
    reporting: Reporting,
) -> Progress:
    """The training loop. Returns where it ended."""
    worker = dist.get_rank()
    for step in range(1, settings.steps + 1):
        _set_lr(optimizer, settings.lr * lr_share(step, settings.steps))
        loss = loss_of(model, task.draw(worker, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told = reporting.step(step, loss.item(), task.tokens_per_step)
        if told.ended:
            return told
    raise AssertionError("the last step ends a run")


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


def _mean_over_workers(value: float, control: dist.ProcessGroup | None) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    if control is not None:
        dist.all_reduce(total, group=control)
    return _float(total / dist.get_world_size())


def _float(scalar: Tensor) -> float:
    return float(scalar.item())
