"""A probe: everything that is measured before a plan is chosen, in under a minute.

`run_probe` runs on every worker of a process group. `launch_probe` (probe_launch.py) starts workers for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist

from laconic.plans.plan import Plan
from laconic.plans.schedules import Never
from laconic.plans.text import plan as parse_plan
from laconic.tools.errors import UsageError, check_positive
from laconic.tools.machine import versions
from laconic.tools.planner.front import PLANS
from laconic.tools.planner.meter import Meter, devices
from laconic.tools.planner.probe_compute import time_codec, time_copy, time_step
from laconic.tools.planner.probe_data import OPS, WORLD, LinkTiming, Probe, Timing
from laconic.tools.planner.probe_network import time_collective, time_links
from laconic.tools.planner.probed_model import load_model

Show = Callable[[float, str], None]
"""Takes the share of the probe that is done, from 0 to 1, and what is measured now."""


@dataclass(frozen=True)
class ProbeOptions:
    """What to measure. Without `model`, it is the lab's, by the arguments `lab` of its script.

    `plans` are measured besides those of the front. `longest_s` is the time of the largest collective.
    """

    lab: tuple[str, ...] = ()
    model: str | None = None
    plans: tuple[str, ...] = ()
    front: bool = True
    groups: tuple[int, ...] = ()
    device: str = "auto"
    longest_s: float = 0.5
    link: str | None = None

    def check(self, workers: int) -> None:
        """Refuse mistakes before any worker starts."""
        check_positive("longest", self.longest_s)
        for text in self.plans:
            parse_plan(text)
        for size in self.groups:
            if size < 2 or workers % size:
                raise UsageError(
                    f"--groups {size}: {workers} workers cannot be divided into groups of {size}. "
                    f"Choose a size from 2 on that divides {workers}."
                )
        if self.device not in ("auto", "cpu", "cuda"):
            raise UsageError(f"--device {self.device}: use cpu or cuda, or leave it out for cuda where there is one.")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UsageError("--device cuda: torch finds no CUDA device here. Leave it out, or install torch for CUDA.")


class _Stages:
    """Shows which stage runs. All stages count alike."""

    def __init__(self, total: int, show: Show) -> None:
        self._total, self._show = total, show
        self._numbers = count()

    @contextmanager
    def stage(self, text: str) -> Iterator[Callable[[float], None]]:
        number = next(self._numbers)
        self._show(number / self._total, text)
        yield lambda share: self._show((number + share) / self._total, text)


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """Make the default process group, as the launcher's environment describes it."""
    _, wire = devices(device)
    dist.init_process_group("gloo" if wire.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_probe(options: ProbeOptions, show: Show = lambda done, text: None) -> Probe:
    """Measure as one worker of the default process group; every worker calls it, and gets the same result."""
    device, wire = devices(options.device)
    meter = Meter(device, wire, options.groups)
    try:
        return _measure(meter, options, show)
    finally:
        meter.close()


def _measure(meter: Meter, options: ProbeOptions, show: Show) -> Probe:
    probed = load_model(options.model, options.lab, meter.worker, meter.device)
    shapes = probed.shapes
    plans = _plans(options, len(shapes.shapes))
    levels = {**meter.sizes, **({WORLD: meter.workers} if meter.workers > 1 else {})}
    stages = _Stages(3 + len(levels) * len(OPS) + len(plans), show)
    with stages.stage("memory"):
        memory = time_copy(meter)
    with stages.stage(f"a training step of {probed.name}"):
        step = None if probed.loss is None else time_step(meter, probed.model, probed.loss)
    codecs = []
    for plan in plans:
        with stages.stage(f"codec of {plan}"):
            codecs.append(time_codec(meter, plan, shapes.shapes))
    timings: list[Timing] = []
    for level, size in levels.items():
        for op in OPS:
            with stages.stage(f"{op} among {size} workers ({level})"):
                timings += time_collective(meter, op, level, size, options.longest_s)
    links: list[LinkTiming] = []
    together = False
    with stages.stage("links between hosts") as progress:
        if len(meter.hosts) > 1:
            links, together = time_links(meter, progress)
    show(1.0, "done")
    return Probe(
        workers=meter.workers,
        hosts=tuple(map(tuple, meter.hosts)),
        device=meter.device.type,
        backend="gloo" if meter.wire.type == "cpu" else "nccl",
        threads=torch.get_num_threads(),
        timings=tuple(timings),
        codecs=tuple(codecs),
        memory=memory,
        model=shapes,
        step=step,
        links=tuple(links),
        links_together=together,
        link=options.link,
        versions=versions(),
    )


def _plans(options: ProbeOptions, tensors: int) -> list[Plan]:
    """The plans to measure, each once: those of the front that fit the model, and those that were asked for."""
    front = [parse_plan(text) for text in PLANS if options.front]
    asked = [parse_plan(text) for text in options.plans]
    for plan in asked:
        try:
            plan.check_fragments(tensors)
        except ValueError as error:
            raise UsageError(f"--plan {error}") from None
    chosen = [*(plan for plan in front if plan.schedule.fragments <= tensors), *asked]
    return [plan for plan in dict.fromkeys(chosen) if not isinstance(plan.schedule, Never)]
