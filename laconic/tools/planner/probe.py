"""A probe: everything that is measured before a plan is chosen, in under a minute.

`run_probe` measures as one worker of a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.plans.plan import Plan
from laconic.plans.schedules import Never
from laconic.tools.errors import UsageError, check_positive
from laconic.tools.lab.tasks import Lab, loss_of, make_task
from laconic.tools.machine import versions
from laconic.tools.planner.measure import Meter, devices, time_codec, time_collective, time_step
from laconic.tools.planner.predict import PLANS
from laconic.tools.planner.probe_data import OPS, ModelShapes, Probe
from laconic.tools.planner.shapes import made_by

Show = Callable[[float, str], None]
"""Takes the share of the probe that is done, from 0 to 1, and what is measured now."""
RULE = (
    "It is called without arguments, and returns a torch.nn.Module, or a module and a function that computes the loss "
    "of its next batch"
)


@dataclass(frozen=True)
class ProbeOptions:
    """What to measure: the lab's model, or that of a "module:function", under the plans of the front and others.

    `longest_s` is the time of the largest collective.
    """

    model: str | None = None
    plans: tuple[Plan, ...] = ()
    front: bool = True
    groups: tuple[int, ...] = ()
    longest_s: float = 0.5

    def check(self, workers: int) -> None:
        """Refuse mistakes before any worker starts."""
        check_positive("longest", self.longest_s)
        for size in self.groups:
            if size < 2 or workers % size:
                raise UsageError(
                    f"--groups {size}: {workers} workers cannot be divided into groups of {size}. "
                    f"Choose a size from 2 on that divides {workers}."
                )
        if self.model is not None and ":" not in self.model:
            raise UsageError(f"--model {self.model}: write module:function. {RULE}.")


@contextmanager
def process_group() -> Iterator[None]:
    """Make the default process group, as the launcher's environment describes it."""
    _, wire = devices()
    dist.init_process_group("gloo" if wire.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_probe(options: ProbeOptions, show: Show = lambda done, text: None) -> Probe:
    """Measure as one worker of the default process group; every worker calls it, and gets the same result."""
    meter = Meter(*devices(), options.groups)
    try:
        return _measure(meter, options, show)
    finally:
        meter.close()


def _measure(meter: Meter, options: ProbeOptions, show: Show) -> Probe:
    name, model, loss = load_model(options.model, meter.worker, meter.device)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    plans = _plans(options)
    stages, numbers = 1 + len(plans) + len(meter.levels) * len(OPS), count()

    def stage(text: str) -> None:  # all stages count alike
        show(next(numbers) / stages, text)

    stage(f"a training step of {name}")
    step = None if loss is None else time_step(meter, model, loss)
    codecs = []
    for plan in plans:
        stage(f"codec of {plan}")
        codecs.append(time_codec(meter, plan, shapes))
    timings = []
    for level, size in meter.levels.items():
        for op in OPS:
            stage(f"{op} among {size} workers ({level})")
            timings += time_collective(meter, op, level, options.longest_s)
    show(1.0, "done")
    return Probe(
        workers=meter.workers,
        hosts=tuple(map(tuple, meter.hosts)),
        device=meter.device.type,
        backend="gloo" if meter.wire.type == "cpu" else "nccl",
        threads=torch.get_num_threads(),
        timings=tuple(timings),
        codecs=tuple(codecs),
        model=ModelShapes(name, shapes),
        step=step,
        versions=versions(),
    )


def _plans(options: ProbeOptions) -> list[Plan]:
    """The plans to measure, each once: those of the front, and those that were asked for."""
    chosen = [*(PLANS if options.front else ()), *options.plans]
    return [plan for plan in dict.fromkeys(chosen) if not isinstance(plan.schedule, Never)]


def load_model(
    name: str | None, worker: int, device: torch.device
) -> tuple[str, nn.Module, Callable[[], Tensor] | None]:
    """Make the lab's model, or that of "module:function"; with a function of its next loss, if there is one."""
    if name is None:
        task, steps = make_task(Lab()), count(1)
        model = task.model.to(device)

        def loss() -> Tensor:
            inputs, targets = task.draw(worker, next(steps))
            return loss_of(model, (inputs.to(device), targets.to(device)))

        return "the lab's gpt", model, loss
    with torch.device(device):
        made = made_by(name, RULE)
    users_model, users_loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(users_model, nn.Module) or not (users_loss is None or callable(users_loss)):
        raise UsageError(f"--model {name}: it returned {type(made).__name__}. {RULE}.")
    return name, users_model.to(device), users_loss
