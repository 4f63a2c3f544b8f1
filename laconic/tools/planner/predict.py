"""The prediction of a plan: what it sends, how long a step takes, and how much of the training it keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf

from torch import Tensor

from laconic.codecs import Exact
from laconic.cost import cycle_of, planned
from laconic.exchange import State, level_name
from laconic.ledger import wire_bytes
from laconic.plans.outer import Nesterov
from laconic.plans.plan import Plan
from laconic.plans.schedules import Never, Payload, Streaming, Sync
from laconic.tools.planner.collectives import NetworkTimes
from laconic.tools.planner.faults import goodput, straggling_s
from laconic.tools.planner.front import Measured, measured
from laconic.tools.planner.sent import Sent
from laconic.tools.planner.shapes import Shapes
from laconic.tools.planner.timeline import Message, Timeline, released_s, timeline

HEADER_BYTES = 40
"""What workers tell each other before weights are averaged, and without DDP before gradients (`checks/headers.py`)."""
DIGEST_BYTES = 16
"""With what they compare their weights after a round (`checks/divergence.py`)."""


@dataclass(frozen=True, eq=False)
class Scenario:
    """A training that a plan is predicted for.

    `compute_s` is a step without communication. `codec_s` has the seconds in which a plan's codec encodes and decodes
    the whole model. `payload_bits` are sent of each parameter, whatever the codec. A `bare` model is not in DDP: its
    gradients are sent after the backward pass. `spread` has the lowest and highest time of what was measured, relative
    to the middle. `gain` is how many times as many steps as `ddp()` a worker by itself needs to the same loss.
    """

    shapes: Shapes
    workers: int
    network: NetworkTimes
    compute_s: float
    payload_bits: float | None = None
    codec_s: Mapping[str, float] = field(default_factory=dict)
    jitter: float = 0.0
    between_faults_s: float | None = None
    machine: int | None = None
    spread: tuple[float, float] = (1.0, 1.0)
    given_gain: float | None = None
    bare: bool = False

    @property
    def gain(self) -> float:
        """How many times as many steps as `ddp()` a worker by itself needs: 2.8 for the lab's four workers."""
        return self.workers**0.75 if self.given_gain is None else self.given_gain


class Prediction:
    """What is known of a plan before it runs."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        self.plan = plan
        self.scenario = scenario
        self._state: State = {}
        self.cycle = cycle_of(plan)
        self.sent = tuple(self._planned())

    def _planned(self) -> list[Sent]:
        """Run the codec on the shapes, and list what it sends."""
        s = self.scenario
        found: list[Sent] = []
        plan = self.plan if s.payload_bits is None else replace(self.plan, codec=Exact())
        for one in planned(plan, s.shapes.tensors, s.workers, s.shapes.units, s.machine, self._state):
            weights = one.sync.payload is Payload.WEIGHTS
            outermost = self.plan.is_outermost(one.sync)
            level, size = self._level(one.sync)
            numel = sum(s.shapes.tensors[name].numel() for name in one.names)
            collectives = tuple(
                (each.op, float(each.payload_bytes), float(each.wire_bytes)) for each in one.collectives
            )
            if s.payload_bits is not None and outermost:
                payload = numel * s.payload_bits / 8
                collectives = (("all_reduce", payload, 2 * (size - 1) / size * payload),)
            schedule = self.plan.schedule
            delay = schedule.delay if isinstance(schedule, Streaming) and weights and outermost else 0
            during = bool(s.shapes.layers) if weights else not s.bare
            before = s.shapes.before(one.names) if during else None
            share = numel / max(1, s.shapes.parameters)
            place = one.step - schedule.start
            found.append(Sent(place, before, share, level, size, collectives, delay, outermost))
        return found if s.payload_bits is not None else [*self._control(), *found]  # headers go first

    def _control(self) -> list[Sent]:
        """List what workers tell each other beside the data."""
        s, schedule = self.scenario, self.plan.schedule
        found: list[Sent] = []
        first = 1.0 if s.shapes.layers else None  # before any data
        for place in range(self.cycle):
            for sync in self.plan.syncs_at(schedule.start + place):
                weights, (level, size) = sync.payload is Payload.WEIGHTS, self._level(sync)
                whole = weights and size == s.workers and sync.part is None
                passed = [HEADER_BYTES] if weights or s.bare else []
                passed += [DIGEST_BYTES] if whole and schedule.period > 1 else []
                sent = tuple(("all_reduce", float(n), float(wire_bytes("all_reduce", n, size))) for n in passed)
                if size > 1 and sent:
                    found.append(Sent(place, first, 0.0, level, size, sent, 0, False))
        return found

    def _level(self, sync: Sync) -> tuple[str, int]:
        """Return the name of a level, and the workers of one of its groups."""
        s = self.scenario
        size = s.workers if sync.level is None else sync.level if isinstance(sync.level, int) else s.machine or 1
        return level_name(None if size == s.workers else size), size

    @property
    def sent_bytes_by_level(self) -> dict[str, float]:
        """The bytes that one worker sends in a step, on average, by level."""
        found: dict[str, float] = {}
        for each in self.sent:
            found[each.level] = found.get(each.level, 0.0) + each.wire_bytes / self.cycle
        return found

    @property
    def sent_bytes_per_step(self) -> float:
        """The bytes that one worker sends in a step, on average."""
        return sum(self.sent_bytes_by_level.values())

    @property
    def rounds_per_step(self) -> float:
        """The collectives of a step, on average: each costs latency."""
        return sum(len(each.collectives) for each in self.sent) / self.cycle

    @cached_property
    def codec_s(self) -> float:
        """The seconds of encoding and decoding the whole model, 0 if they were not measured."""
        return self.scenario.codec_s.get(repr(self.plan), 0.0)

    def timeline(self, network: NetworkTimes | None = None, factor: float = 1.0) -> Timeline:
        """Return the time of a cycle; with `factor`, where all seconds are so many times as long."""
        s, network = self.scenario, network or self.scenario.network
        compute_s = s.compute_s * factor
        steps: list[list[Message]] = [[] for _ in range(self.cycle)]
        for each in self.sent:
            seconds = each.seconds(network) + (self.codec_s * each.share if each.encoded else 0.0)
            release = compute_s if each.before is None else released_s(1 - each.before, compute_s)
            steps[each.step].append(Message(release, seconds * factor, each.delay))
        waits = straggling_s(s.workers, compute_s, s.jitter, self.meets_every) if self.sent else 0.0
        made = timeline([sorted(step, key=lambda m: m.release_s) for step in steps], compute_s)
        return Timeline(made.total_s + waits * made.steps, compute_s, made.steps)

    @cached_property
    def meets_every(self) -> int:
        """The steps between two synchronisations of all workers."""
        steps = {each.step for each in self.sent if each.level == "world"}
        return max(1, self.cycle // max(1, len(steps)))

    @cached_property
    def now(self) -> Timeline:
        """The time of a cycle on the network as it is."""
        return self.timeline()

    @property
    def step_s(self) -> float:
        """The seconds of a step, on average."""
        return self.now.step_s

    @property
    def interval_s(self) -> tuple[float, float]:
        """The lowest and highest seconds of a step that what was measured allows."""
        low, high = self.scenario.spread
        return self.timeline(factor=low).step_s, self.timeline(factor=high).step_s

    @property
    def longest_s(self) -> float:
        """The seconds of the longest synchronisation."""
        by_step: dict[int, float] = {}
        for each in self.sent:
            seconds = each.seconds(self.scenario.network) + self.codec_s * each.share
            by_step[each.step] = by_step.get(each.step, 0.0) + seconds
        return max(by_step.values(), default=0.0)

    @property
    def peak_bps(self) -> float:
        """The rate at which the largest synchronisation would be hidden: in its steps of delay, or in one step."""
        by_step: dict[int, float] = {}
        for each in self.sent:
            by_step[each.step] = by_step.get(each.step, 0.0) + 8 * each.wire_bytes
        window = self.scenario.compute_s * max((each.delay for each in self.sent), default=0) or self.scenario.compute_s
        return max(by_step.values(), default=0.0) / window

    @property
    def memory_bytes(self) -> int:
        """The bytes that the plan keeps on each worker: residuals, factors, the anchor, outer momentum."""
        numbers = self.scenario.shapes.parameters
        anchor = 4 * numbers * self.plan.needs_anchor
        momentum = 4 * numbers if isinstance(self.plan.outer, Nesterov) and self.plan.outer.momentum else 0
        return _tensor_bytes(self._state) + anchor + momentum

    @cached_property
    def measured(self) -> Measured | None:
        """What was measured of the loss under this plan."""
        return measured(self.plan)

    @property
    def kept(self) -> float | None:
        """The share of what talking gives that the plan keeps; None if it was not measured."""
        return None if self.measured is None else self.measured.kept

    @property
    def steps_factor(self) -> float | None:
        """How many times as many steps as `ddp()` it needs to the same loss; None if that is unknown.

        The progress of a step is taken to lie between that of `ddp()`, 1, and that of a worker by itself, 1 / gain, at
        the share that the plan keeps.
        """
        return None if self.kept is None else 1 / (self.kept + (1 - self.kept) / self.scenario.gain)

    @property
    def loss_s(self) -> float | None:
        """The seconds of as much progress as a step of `ddp()` makes; None if it is unknown."""
        return None if self.steps_factor is None else self.step_s * self.steps_factor

    @property
    def goodput(self) -> float:
        """The share of the work that faults leave."""
        lost_s = self.step_s * (1 if not self.plan.local else max(1, self.meets_every))
        return goodput(lost_s, self.scenario.between_faults_s)

    @property
    def timeout_s(self) -> int:
        """How long a worker should wait for the others: ten times the longest step, and at least 30 s."""
        return max(30, 10 * ceil(self.longest_s + self.scenario.compute_s))

    def needs_bps(self, utilisation: float) -> float | None:
        """Return the rate of the slowest link at which workers compute this share of the time; None if no rate does."""
        return self._rate_where(lambda network: self.timeline(network).utilisation >= utilisation)

    def break_even_bps(self, ddp: Prediction) -> float | None:
        """Return the rate of the slowest link from which on `ddp()` is as soon at the same loss; None for no rate."""
        factor = self.steps_factor or 1.0
        if factor == 1.0 and not self.codec_s:  # it sends less, and costs nothing
            return None

        def as_soon(network: NetworkTimes) -> bool:
            return ddp.timeline(network).step_s <= self.timeline(network).step_s * factor

        return self._rate_where(as_soon)

    def _rate_where(self, holds: Callable[[NetworkTimes], bool]) -> float | None:
        """Find the lowest rate at which a condition holds that holds for all higher ones."""
        network = self.scenario.network
        low, high = -40.0, 60.0  # powers of 2, of the rate as it is
        if isinstance(self.plan.schedule, Never):
            return 0.0
        if not holds(network.faster(2**high)):
            return None
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(network.faster(2**middle)) else (middle, high)
        return network.rate_bps * 2**high

    def sooner_than(self, other: Prediction) -> float | None:
        """Return how many times sooner than another plan it reaches the same loss."""
        if self.loss_s is None or other.loss_s is None:
            return None
        return other.loss_s / self.loss_s if self.loss_s else inf


def _tensor_bytes(tree: object) -> int:
    """Count the bytes of all tensors in a tree of dicts, without caches."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, dict):
        return sum(_tensor_bytes(value) for key, value in tree.items() if not str(key).startswith("_"))
    if isinstance(tree, list | tuple):
        return sum(_tensor_bytes(value) for value in tree)
    return 0
