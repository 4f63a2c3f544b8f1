"""What a plan sends, how long its steps take and how many it needs, predicted; and several plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, inf, isfinite
from typing import Any

from laconic.checks.agreement import DIGEST_BYTES
from laconic.checks.headers import HEADER_BYTES
from laconic.codecs.routing import routed
from laconic.cost import cycle_of, facts_of, has_rule, kept_bytes, planned, size_of, tensor_bytes, widened
from laconic.exchange import State, level_name
from laconic.ledger import Entry, crossing_bytes, wire_bytes
from laconic.noise import LEAST_WORTH, worth
from laconic.packing import in_fragments
from laconic.plans.methods import Group, alone, ddp, diloco, frugal, power_sgd, quantized_ddp, streaming_diloco
from laconic.plans.outer import Nesterov
from laconic.plans.plan import Plan
from laconic.plans.schedules import Never, Payload, Streaming, Sync
from laconic.plans.targets import Kind, ModelFacts, width_of
from laconic.plans.topology import World
from laconic.tools.planner.network import Message, Network, Timeline, released_s, timeline
from laconic.tools.planner.quality import STEPS, Kept, TrainingFacts, predict
from laconic.tools.planner.shapes import Shapes
from laconic.tools.units import percent, rate_text

SECONDS_A_DAY = 86_400
NEEDS = (0.5, 0.8, 0.95)
"""The shares of the time to compute for which the JSON has the rate of the link that they need."""
WORTH = 1.05
"""How many times sooner than `ddp()` a plan must reach the same loss to be worth a change."""
PLANS: tuple[Plan, ...] = (
    ddp(),
    ddp("bf16"),
    quantized_ddp(bits=4),
    frugal("30x"),
    frugal("60x"),
    power_sgd(rank=32, bits=4),
    frugal("120x"),
    diloco(period=16),
    streaming_diloco(),
)
"""The front: what is compared, measured and chosen from where no plan is named."""


@dataclass(frozen=True)
class Transfer:
    """What one worker sends of one bucket: when, to how many workers, and in which collectives."""

    step: int
    """Of the cycle, from 0."""
    before: float | None
    """The share of the model before it in the forward pass; None if it is sent after the step."""
    share: float
    """Its share of the model's parameters."""
    level: str
    workers: int
    collectives: tuple[Entry, ...]
    delay: int = 0
    """In how many steps it is due."""
    encoded: bool = True
    """Whether the plan's own codec sends it."""

    @property
    def wire_bytes(self) -> int:
        """The bytes that are sent."""
        return sum(each.wire_bytes for each in self.collectives)

    def crossing_bytes(self, unit: int) -> float:
        """Return the bytes that a unit of neighbouring workers, such as those of one machine, sends to others."""
        if unit == 1:
            return self.wire_bytes
        return sum(crossing_bytes(each.op, each.payload_bytes, self.workers, unit) for each in self.collectives)

    def seconds(self, network: Network) -> float:
        """Return the seconds of the collectives on a network."""
        return sum(network.seconds(each.op, each.payload_bytes, self.workers) for each in self.collectives)

    def released_s(self, compute_s: float) -> float:
        """Return when it is ready, from the start of a step that computes so long."""
        return compute_s if self.before is None else released_s(1 - self.before, compute_s)


@dataclass(frozen=True, eq=False)
class Scenario:
    """A training that a plan is predicted for.

    `compute_s` is a step without communication. `codec_s` has the seconds in which a plan's codec encodes and decodes
    the whole model. `machine` is the number of workers of one machine. A `bare` model is not in DDP: its gradients are
    sent after the backward pass. `spread` has the lowest and highest time of what was measured, relative to the middle.
    `steps` is the length of the training, `optimizers` are the kinds of the model's: what plans keep depends on both.
    """

    shapes: Shapes
    workers: int
    network: Network
    compute_s: float
    codec_s: Mapping[Plan, float] = field(default_factory=dict)
    machine: int | None = None
    spread: tuple[float, float] = (1.0, 1.0)
    bare: bool = False
    noise: float | None = None
    """The gradient noise scale, in batches of one worker (`laconic.Health`); None if it is unknown."""
    steps: int = STEPS
    optimizers: tuple[Kind, ...] = ("adaptive",)

    @cached_property
    def facts(self) -> ModelFacts:
        """What targets of bytes are resolved from."""
        return facts_of(self.shapes.tensors, self.workers, self.shapes.buffers, self.optimizers, self.machine)

    @property
    def sharing(self) -> int:
        """How many workers share the slowest link: those of one machine or of another group, or one."""
        return self.network.sharing

    @property
    def front(self) -> tuple[Plan, ...]:
        """The front; where workers share links in groups, with its local plans between these groups, too."""
        if not 1 < self.sharing < self.workers:
            return PLANS
        group: Group = "machine" if self.sharing == self.machine else self.sharing
        between = (frugal(each, group=group) for each in ("30x", "60x", "120x"))
        return (*PLANS, *between, diloco(period=16, group=group))

    def training(self, group: int = 1) -> TrainingFacts:
        """What is known of the training for what plans keep of it, for workers in groups that act as one."""
        kind = "muon" if "muon" in self.optimizers else self.optimizers[0]
        noise = None if self.noise is None else self.noise / group  # in batches of a group
        return TrainingFacts(width_of(self.shapes.tensors), self.steps, kind, noise)

    def gain(self, group: int = 1) -> float:
        """How many times as many steps as `ddp()` a worker by itself needs, or a group that acts as one worker.

        Where the noise is unknown, 2.8 for four, as in the lab.
        """
        workers = self.workers // group
        return float(workers**0.75) if self.noise is None else worth(self.noise / group, workers)


class Prediction:
    """What is known of a plan before it runs; of a target of bytes, as what it becomes on this model: `resolved`."""

    def __init__(self, plan: Plan, scenario: Scenario) -> None:
        self.plan = plan
        self.resolved = plan.resolved(scenario.facts)
        self.scenario = scenario
        self._state: State = {}
        self.cycle = cycle_of(self.resolved)
        self.sent = (*self._control(), *self._buckets())  # headers go first

    def _buckets(self) -> Iterator[Transfer]:
        """Run the codec on the shapes, and list what it sends."""
        s, plan, schedule = self.scenario, self.resolved, self.resolved.schedule
        shapes = s.shapes
        for one in planned(plan, shapes.tensors, s.workers, shapes.units, s.machine, self._state, shapes.buffers):
            weights, outermost = one.sync.payload is Payload.WEIGHTS, plan.is_outermost(one.sync)
            during_backward = bool(shapes.layers) if weights else not s.bare
            yield Transfer(
                one.step - schedule.start,
                shapes.before(one.names) if during_backward and one.names else None,
                sum(shapes.tensors[name].numel() for name in one.names) / max(1, shapes.parameters),
                *self._level(one.sync),
                one.collectives,
                schedule.delay if isinstance(schedule, Streaming) and weights and outermost else 0,
                outermost and bool(one.names),
            )

    def _control(self) -> Iterator[Transfer]:
        """List what workers send each other beside the data: headers, and digests of what has become equal."""
        s, schedule = self.scenario, self.resolved.schedule
        delay = schedule.delay if isinstance(schedule, Streaming) else 0
        fragments = in_fragments(s.shapes.tensors, schedule.fragments)
        for place in range(self.cycle):
            for sync in self.resolved.syncs_at(schedule.start + place):
                weights, (level, size) = sync.payload is Payload.WEIGHTS, self._level(sync)
                if size > 1 and (weights or s.bare):
                    yield self._message(place, level, size, HEADER_BYTES)
                some = bool(fragments[sync.fragment or 0])  # an empty fragment is not compared
                if size == s.workers > 1 and weights and some and schedule.period > 1:
                    yield self._message((place + delay) % self.cycle, level, size, DIGEST_BYTES)

    def _message(self, place: int, level: str, size: int, payload_bytes: int) -> Transfer:
        before = 1.0 if self.scenario.shapes.layers else None  # before any data
        sent = wire_bytes("all_reduce", payload_bytes, size)
        entry = Entry(place, 1, "all_reduce", level, "control", payload_bytes, sent, 0.0, size)
        return Transfer(place, before, 0.0, level, size, (entry,), encoded=False)

    def _level(self, sync: Sync) -> tuple[str, int]:
        """Return the name of a level, and the workers of one of its groups."""
        s = self.scenario
        size = size_of(sync.level, s.workers, s.machine)
        return level_name(None if size == s.workers else size), size

    # What is sent.

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
    def link_bytes_per_step(self) -> float:
        """The bytes that go over one of the slowest links in a step, on average, in the one direction."""
        return sum(each.crossing_bytes(self.scenario.sharing) for each in self.sent) / self.cycle

    @property
    def rounds_per_step(self) -> float:
        """The collectives of a step, on average: each costs latency."""
        return sum(len(each.collectives) for each in self.sent) / self.cycle

    @property
    def bytes_a_day(self) -> float:
        """The bytes that go over one of the slowest links in a day of training."""
        return self.link_bytes_per_step / self.step_s * SECONDS_A_DAY if self.step_s else 0.0

    @property
    def memory_bytes(self) -> int:
        """The bytes that the plan keeps on each worker: residuals, factors, the anchor, outer momentum."""
        numbers = self.scenario.shapes.parameters
        anchor, outer = 4 * numbers * self.resolved.needs_anchor, self.resolved.outer
        momentum = 4 * numbers if isinstance(outer, Nesterov) and outer.momentum else 0
        return self._codec_bytes + anchor + momentum

    @cached_property
    def _codec_bytes(self) -> int:
        """The bytes that the plan's codec keeps."""
        plan, tensors = self.resolved, self.scenario.shapes.tensors
        if not has_rule(plan.codec):
            return tensor_bytes(self._state)
        wide = widened(tensors) if plan.needs_anchor else tensors
        return kept_bytes(routed(plan.codec), wide) if self.scenario.workers > 1 else 0

    # How long it takes.

    @property
    def codec_s(self) -> float:
        """The seconds of encoding and decoding the whole model, 0 if they were not measured."""
        return self.scenario.codec_s.get(self.plan, 0.0)

    def timeline(self, faster: float = 1.0, factor: float = 1.0) -> Timeline:
        """Return the time of a cycle where links are so many times as fast, and all seconds `factor` times as long."""
        compute_s = self.scenario.compute_s * factor
        steps: list[list[Message]] = [[] for _ in range(self.cycle)]
        for each, (fixed_s, sending_s) in zip(self.sent, self._seconds, strict=True):
            seconds = (fixed_s + sending_s / faster) * factor
            steps[each.step].append(Message(each.released_s(compute_s), seconds, each.delay))
        return timeline([sorted(step, key=lambda m: m.release_s) for step in steps], compute_s)

    @cached_property
    def _seconds(self) -> list[tuple[float, float]]:
        """What each message takes whatever the rate of the links (latency, codec), and what it takes at their rate."""
        network, codec_s = self.scenario.network, self.codec_s
        endless, found = network.faster(inf), list[tuple[float, float]]()
        for each in self.sent:
            latency_s = each.seconds(endless)
            coding_s = codec_s * each.share if each.encoded else 0.0
            found.append((latency_s + coding_s, each.seconds(network) - latency_s))
        return found

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
    def timeout_s(self) -> int:
        """How long a worker should wait for the others: ten times the longest step, and at least 30 s."""
        by_step: dict[int, float] = {}
        for each, seconds in zip(self.sent, self._seconds, strict=True):
            by_step[each.step] = by_step.get(each.step, 0.0) + sum(seconds)
        return max(30, 10 * ceil(max(by_step.values(), default=0.0) + self.scenario.compute_s))

    # What it does to the loss.

    @cached_property
    def group(self) -> int:
        """How many workers average gradients at every step under a local plan: they act as one of so large a batch."""
        inner = self.resolved.topology.inner
        return 1 if inner is None else self._level(Sync(Payload.GRADIENT, inner))[1]

    @cached_property
    def predicted(self) -> Kept | None:
        """What the plan keeps of DDP's improvement over no communication; None if nothing like it was measured.

        With groups, over groups that do not communicate.
        """
        if self.group == 1:
            return predict(self.resolved, self.scenario.training())
        if self.group == self.scenario.workers:
            return Kept(1.0, 1.0, 1.0)
        return predict(replace(self.resolved, topology=World()), self.scenario.training(self.group))

    @property
    def kept(self) -> float | None:
        """The middle of what it keeps; None if nothing like it was measured."""
        return None if self.predicted is None else self.predicted.value

    @property
    def steps_factor(self) -> float | None:
        """How many times as many steps as `ddp()` it needs to the same loss; None if that is unknown.

        The progress of a step is assumed to lie between that of `ddp()`, 1, and that of a worker or a group by itself,
        1 / gain, at the fraction that the plan keeps.
        """
        return None if self.kept is None else 1 / (self.kept + (1 - self.kept) / self.scenario.gain(self.group))

    @property
    def loss_s(self) -> float | None:
        """The seconds of as much progress as a step of `ddp()` makes; None if it is unknown."""
        return None if self.steps_factor is None else self.step_s * self.steps_factor

    def sooner_than(self, other: Prediction) -> float | None:
        """Return how many times sooner than another plan it reaches the same loss."""
        if self.loss_s is None or other.loss_s is None:
            return None
        return other.loss_s / self.loss_s if self.loss_s else inf

    # Which links it needs.

    def needs_bps(self, utilisation: float) -> float | None:
        """Return the rate of the slowest link at which workers compute this share of the time; None if no rate does."""
        return self._rate_where(lambda faster: self.timeline(faster).utilisation >= utilisation)

    def break_even_bps(self, ddp: Prediction) -> float | None:
        """Return the rate of the slowest link from which on `ddp()` is as soon at the same loss; None for no rate."""
        factor = self.steps_factor or 1.0
        if factor == 1.0 and not self.codec_s:  # it sends less, and costs nothing
            return None

        def as_soon(faster: float) -> bool:
            return ddp.timeline(faster).step_s <= self.timeline(faster).step_s * factor

        return self._rate_where(as_soon)

    def _rate_where(self, holds: Callable[[float], bool]) -> float | None:
        """Find the lowest rate at which a condition holds that holds for all higher ones, by bisection."""
        low, high = -40.0, 60.0  # powers of 2, of the rate as it is
        if isinstance(self.resolved.schedule, Never):
            return 0.0
        if self.scenario.network.rate_bps == inf or not holds(2**high):
            return None
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if holds(2**middle) else (middle, high)
        return self.scenario.network.rate_bps * 2**high


# Several plans beside each other: ranked, as data, and as one sentence of advice.


class Forecast:
    """The predictions of several plans for one training, and of `ddp()` and `alone()` beside them."""

    def __init__(self, plans: Sequence[Plan], scenario: Scenario) -> None:
        self.scenario = scenario
        self.rows = [Prediction(plan, scenario) for plan in plans]
        self.ddp = self._of(ddp())
        self.alone = self._of(alone())

    def _of(self, plan: Plan) -> Prediction:
        return next((each for each in self.rows if each.plan == plan), None) or Prediction(plan, self.scenario)

    @property
    def ranked(self) -> list[Prediction]:
        """The plans by the time to the same loss; those of which it is unknown come last, by the time of a step."""
        return sorted(self.rows, key=lambda each: (each.loss_s is None, each.loss_s or each.step_s))

    def as_json(self) -> Any:
        """Return everything as an object for JSON."""
        s = self.scenario
        return {
            "parameters": s.shapes.parameters,
            "workers": s.workers,
            "rate_bps": s.network.rate_bps,
            "compute_s": s.compute_s,
            "noise": s.noise,
            "gain": s.gain(),
            "workers_sharing_a_link": s.sharing,
            "steps": s.steps,
            "optimizers": list(s.optimizers),
            "rows": [self._row(each) for each in self.rows],
            "advice": self.advice,
        }

    def _row(self, each: Prediction) -> dict[str, Any]:
        low, high = each.interval_s
        row: dict[str, Any] = {
            "plan": repr(each.plan),
            "resolved": repr(each.resolved),
            "sent_bytes_per_step": each.sent_bytes_per_step,
            "link_bytes_per_step": each.link_bytes_per_step,
            "sent_bytes_by_level": each.sent_bytes_by_level,
            "rounds_per_step": each.rounds_per_step,
            "bytes_a_day": each.bytes_a_day,
            "codec_s": each.codec_s,
            "exposed_s": each.now.exposed_s,
            "step_s": each.step_s,
            "step_s_low": low,
            "step_s_high": high,
            "utilisation": each.now.utilisation,
            "speedup_over_ddp": self.ddp.step_s / each.step_s,
            "memory_bytes": each.memory_bytes,
            "kept": each.kept,
            "kept_low": None if each.predicted is None else each.predicted.low,
            "kept_high": None if each.predicted is None else each.predicted.high,
            "steps_factor": each.steps_factor,
            "sooner_than_ddp": each.sooner_than(self.ddp),
            "sooner_than_alone": each.sooner_than(self.alone),
            "break_even_bps": None if each is self.ddp else each.break_even_bps(self.ddp),
            "needs_bps": {f"{need:.0%}": each.needs_bps(need) for need in NEEDS},
            "timeout_s": each.timeout_s,
        }
        return {key: value if not isinstance(value, float) or isfinite(value) else None for key, value in row.items()}

    @property
    def advice(self) -> str:
        """One sentence: which plan to use, or none, and why."""
        s = self.scenario
        if s.noise is not None and s.gain() < LEAST_WORTH:
            return (
                f"Train by alone(): under a noise of {s.noise:.3g}, {s.workers} workers are worth at most "
                f"{s.gain():.2f} that train by themselves, whatever they send. Smaller batches make better use of them."
            )
        known = [each for each in self.rows if each.loss_s is not None and each.plan not in (ddp(), alone())]
        best = max(known, key=lambda each: each.sooner_than(self.ddp) or 0.0, default=None)
        busy = f"under ddp() workers compute {percent(self.ddp.now.utilisation)} of the time"
        if best is None:
            return f"{busy[0].upper()}{busy[1:]}. {self._unknown()}"
        sooner, than_alone = best.sooner_than(self.ddp) or 0.0, best.sooner_than(self.alone) or 0.0
        if sooner < WORTH and (self.ddp.sooner_than(self.alone) or 0.0) >= 1:
            how = f"only {sooner:.2f} times sooner" if sooner >= 1 else f"{1 / sooner:.2f} times later"
            return f"Do not compress: {busy}, and {best.plan}, the best of the others, reaches the same loss {how}."
        if than_alone < 1:
            return (
                f"Do not train together over this link: {best.plan}, the best of these plans, reaches the same loss "
                f"{1 / than_alone:.1f} times later than workers without communication. Get a faster link, longer steps "
                "(larger batches), or a plan that sends less."
            )
        factor = best.steps_factor or 1.0
        kept = percent(best.kept)
        more = "" if factor < 1.005 else f" It needs {factor:.2f} times as many steps, for it keeps {kept}."
        rate = best.break_even_bps(self.ddp)
        until = "" if rate is None else f" On links faster than {rate_text(rate, digits=3)}, do not compress."
        return (
            f"Use {best.plan}: it reaches the same loss {sooner:.1f} times sooner than ddp() and {than_alone:.1f} "
            f"times sooner than alone(); {busy}, under it {percent(best.now.utilisation)}.{more}{until}"
        )

    def _unknown(self) -> str:
        others = [each for each in self.rows if each.loss_s is None]
        if not others:
            return "No other plan was given."
        quick = min(others, key=lambda each: each.step_s)
        return (
            f"A step of {quick.plan} is {self.ddp.step_s / quick.step_s:.1f} times as fast as one of ddp(), but what "
            "it does to the loss was not measured: compare it beside alone() first (laconic compare)."
        )
