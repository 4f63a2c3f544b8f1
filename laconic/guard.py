"""The guard: notices that a plan loses too much of what it averages, and goes on with a stronger one.

    session = laconic.attach(plan, model, optimizer, observers=[laconic.Guard("act")])

Every few steps it measures `session.health`. Error feedback delivers late what a codec loses; a codec that is too weak
lags behind by more than a step of gradients, and the model then trains on old gradients. That is the alarm, in two
measurements in a row. The guard only ever makes a plan stronger, so it cannot oscillate.

It measures with short sketches. A sketch of a set of tensors is 254 sums of their numbers with random signs, the same
signs on all workers. Its squared norm is that of the tensors, to about 9 %, and the mean of the workers' sketches is
the sketch of their mean. So one gather of three sketches gives the norms of means that no worker has ever computed: of
the gradients, and of residuals.

Sketches of gradients also tell the gradient noise (`noise.py`), under every plan that synchronises: where gradients are
averaged, those of each measurement; in local steps, sketches that are gathered at a later synchronisation.
"""

from __future__ import annotations

import hashlib
import logging
import math
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from laconic.checks.agreement import digest_of
from laconic.codecs import Codec, Exact, TopDCT
from laconic.codecs.feedback import contains, residuals_by_name
from laconic.cost import sent_bytes
from laconic.errors import DisagreementError
from laconic.exchange import Averaged, Exchange, Peers, State
from laconic.noise import NoiseAverage, worth
from laconic.packing import wide_dtype
from laconic.plans.methods import ddp
from laconic.plans.plan import Plan
from laconic.plans.schedules import GRADIENTS, Every, Nested, Never, Quadratic, Schedule, Streaming, Timed
from laconic.session.gradients import CARRY_STEPS
from laconic.session.live_model import local_of
from laconic.session.metrics import Health
from laconic.session.observers import StepObserver
from laconic.session.session import Session
from laconic.torch_private.steps import loss_scale
from laconic.values import as_code, is_number, is_whole

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["warn", "act"]
_IN_A_ROW = 2
"""Measurements above the limit that are an alarm: one may be a short gradient."""
_FALL = 0.7
"""Residuals fall with the rank as rank ** -0.7 (docs/log.md, 2026-11-16)."""
_AIM = 3
"""A stronger plan should be below the limit by this factor: a plan that is just below it loses, too."""
_MOST_RANK = 64
_MOST_FRACTION = 0.25
_MOST_BITS = 8
"""What a codec gets before it is exact."""
SKETCH = 254
"""Numbers in a sketch. Tensors are cut into rows of so many, and each row has one sign. With 256, the rows of a matrix
of 256 columns would be those of the gradient, which are nearly parallel, and the norm is then wrong by 30 to 50 %."""
MOST_TENSORS = 32
"""The largest tensors of an exchange are sketched, and no others: on a GPU the launches would cost more than 1 %."""
_BLOCK = 4096
"""Rows of SKETCH numbers of a narrow dtype that are widened at once: 4 MB."""
_TURNS = 1024
"""From so many places the signs of a tensor begin, in turn, so that the errors of sketches average out."""
_RARELY = 4
"""In local steps, gradients are sketched once in so many of the guard's measurements."""
_MOST_KEPT = 64
"""Sketches of gradients that wait for a synchronisation: the latest."""


@dataclass(frozen=True, repr=False)
class Guard(StepObserver):
    """For `attach(..., observers=[Guard(...)])`, on every worker. "warn" logs; "act" also makes the plan stronger.

    It acts when the mean residual is longer than `limit` mean gradients (or deltas), measured every `every` steps, and
    chooses no plan that sends more than the share `budget` of what `ddp()` sends.
    """

    mode: Mode = "act"
    budget: float = 0.5
    limit: float = 1.5
    every: int = 4

    __repr__ = as_code

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f'Guard({self.mode!r}): it must be "warn" or "act". Leave the guard out for none.')
        if not is_number(self.budget) or not 0 < self.budget <= 1:
            raise ValueError(
                f"Guard(budget={self.budget!r}): it is a share of the bytes of ddp(), above 0 and at most 1."
            )
        if not is_number(self.limit) or self.limit <= 0:
            raise ValueError(f"Guard(limit={self.limit!r}): it must be a number above 0, such as 1.5.")
        if not is_whole(self.every):
            raise ValueError(f"Guard(every={self.every!r}): it must be a whole number of steps, such as 8.")

    def attached(self, session: Session) -> None:
        """Begin to measure. All workers check that they have the same guard."""
        if session.sharded and self.mode == "act":
            raise ValueError(
                f"attach(observers=[{self!r}]): on a sharded model the workers of each shard would decide for "
                'themselves. Use Guard("warn"), and session.change(plan) on all workers.'
            )
        session.plan.check_by_steps(f"attach(observers=[{self!r}])")
        rows = session.gather([digest_of(repr(self))])
        if any(row != rows[0] for row in rows):
            raise DisagreementError(
                f"attach(observers=[{self!r}]): the workers have different guards. Give all of them the same."
            )
        session.observe(_Monitor(self))


class _Monitor(StepObserver):
    """Measures, logs and acts for one session.

    Whether an exchange is measured follows from its step, and is decided where the exchange is submitted: the codec
    that runs it carries the measurement with it. So all workers measure the same exchanges, and gather their rows after
    the same step, however far the threads of their queues are.
    """

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._signs = Signs()
        self._plan: Plan | None = None
        self._next = 0
        """The step from which on the next measurement begins."""
        self._pending: deque[Measurement] = deque()
        """Measurements that have begun and were not gathered, oldest first."""
        self._noise = NoiseAverage()
        self._next_local = 0
        """The step from which on the gradients of a local step are sketched."""
        self._local: deque[Tensor] = deque(maxlen=_MOST_KEPT)
        """Sketches of gradients of local steps, [SKETCH] each, that were not gathered."""
        self._recent: deque[Health] = deque(maxlen=_IN_A_ROW)
        self._warned_of: Plan | None = None
        """The plan of which the log says that it is too weak."""

    def attached(self, session: Session) -> None:
        """Measure for the first time after `every` steps."""
        self.restarted(session)
        ledger = session.ledger
        session.wrap_codec(lambda codec: self._codec_for(ledger.step, codec))

    def restarted(self, session: Session) -> None:
        """Drop what was measured before. After a change of the plan, wait until carried residuals are delivered."""
        carries = self._plan not in (None, session.plan) and not session.plan.local  # only those of gradients are
        wait = CARRY_STEPS if carries else 0
        self._plan, self._next = session.plan, session.step + wait + self._guard.every
        self._next_local = session.step + 1
        if isinstance(session.plan.schedule, Timed):  # after a change: the workers are not at the same step any more
            self._next = self._next_local = sys.maxsize
        self._noise = NoiseAverage()  # of gradients that may have another scale, among workers that may be others
        self._pending.clear()
        self._local.clear()
        self._recent.clear()

    def before_step(self, session: Session) -> None:
        """Sketch the gradients of a local step now and then: where weights are equal, or late in a long round."""
        plan, step, every = session.plan, session.step + 1, _RARELY * self._guard.every
        if step < self._next_local or not plan.local or isinstance(plan.schedule, Never) or session.workers == 1:
            return
        if plan.syncs_at(step)[:1] == GRADIENTS or plan.topology.inner is not None:
            return  # they are those of a group, or are sketched where they are averaged
        if session.synced or step >= self._next_local + every:
            self._next_local = step + every
            self._local.append(self._sketch_of_gradients(session, step))

    def after_step(self, session: Session) -> None:
        """Gather the measurements whose exchanges have ended on all workers."""
        while self._pending and self._pending[0].due <= session.step:
            self._gather(session, self._pending.popleft())
        if self._local and session.synced and not session.plan.needs_anchor:  # no codec runs: nothing else is measured
            self._gather(session, None)

    def _sketch_of_gradients(self, session: Session, step: int) -> Tensor:
        """Return the sketch of the largest tensors of this worker's gradients, without the loss scale."""
        params = session.parameters
        grads = {name: params[name].grad for name in largest(params)}
        found = {name: local_of(g.to_dense() if g.is_sparse else g) for name, g in grads.items() if g is not None}
        if not found:  # a step that was skipped: no measurement
            return torch.full([SKETCH], torch.nan)
        sketch = self._signs.sketch(found, step, next(iter(found.values())).device)
        for scale in map(loss_scale, session.optimizers):
            if scale is not None:
                return sketch / scale.to(sketch.device)
        return sketch

    def _gather(self, session: Session, measurement: Measurement | None) -> None:
        """Gather a measurement, if any, and the sketches of local gradients that have come together."""
        row = [] if measurement is None else measurement.row()
        rows = session.gather([*row, *(number for sketch in self._local for number in _packed(sketch))])
        self._local.clear()
        health = None
        for sketches in zip(*(_sketches(each[len(row) :]) for each in rows), strict=True):
            health = gradient_health(sketches, session.step)
            self._add_noise(health, session.workers)
        if measurement is not None:
            health = health_of([each[: len(row)] for each in rows], session.step)
            if health is not None and measurement.of_gradients:
                self._add_noise(health, session.workers)
        self._judge(session, health)

    def _add_noise(self, health: Health, workers: int) -> None:
        """Count the norms of gradients for the noise."""
        signal = health.norm**2
        self._noise.add(signal + health.drift**2, signal, workers)

    def _codec_for(self, step: int, codec: Codec) -> Codec:
        """Return the codec for what is averaged in this step, with the measurement that it belongs to, if any."""
        if not self._pending or step > self._pending[-1].last:
            if step < self._next or self._plan is None:
                return codec
            self._pending.append(Measurement.of(self._plan, step, self._signs))
            self._next = step + self._guard.every
        return SketchCodec(codec, self._pending[-1])

    def _judge(self, session: Session, health: Health | None) -> None:
        if health is None or not health.finite:
            return
        noise = self._noise.noise
        health = replace(health, noise=noise, worth=None if noise is None else worth(noise, session.workers))
        session.health = health
        session.ledger.note("health", health.step, asdict(health))
        self._recent.append(health)
        lags = [each.residual for each in self._recent]
        is_momentum = contains(session.plan.codec, TopDCT)  # which is long by intent
        if len(lags) == _IN_A_ROW and min(lags) > self._guard.limit and not is_momentum:
            self._alarm(session, max(lags))

    def _alarm(self, session: Session, lag: float) -> None:
        old = session.plan
        new = stronger_within(self._guard, session, lag) if self._guard.mode == "act" else None
        first, self._warned_of = self._warned_of != old, old
        if new is not None:
            session.change(new)
        logs = session.group is None or session.group.rank() == 0  # one worker for all
        if logs and (new is not None or first):
            logger.warning("%s", _message(self._guard, session.step, lag, old, new))


def stronger_within(guard: Guard, session: Session, lag: float) -> Plan | None:
    """Return the plan to go on with when residuals are as long as `lag` gradients; None if the budget allows none.

    It is the weakest plan whose residuals should be well below the limit, or the strongest that the budget allows.
    """
    doublings = math.ceil(math.log2(_AIM * lag / guard.limit) / _FALL)
    shapes = {name: p.shape for name, p in session.parameters.items()}
    most = guard.budget * sent_bytes(ddp(), shapes, session.workers)
    found = None
    for index, plan in enumerate(strengths(session.plan), start=1):
        if sent_bytes(plan, shapes, session.workers) > most:
            break
        found = plan
        if index == doublings:
            break
    return found


def _message(guard: Guard, step: int, lag: float, old: Plan, new: Plan | None) -> str:
    why = f"guard, step {step}: {old!r} is behind by {lag:.1f} mean gradients or deltas, above {guard.limit:g}"
    if new is not None:
        return f"{why}. All workers go on with {new!r}."
    if guard.mode == "act":
        return f"{why}, and no stronger plan sends less than {guard.budget:g} of the bytes of ddp(). It stays."
    return f'{why}. It trains on old gradients: use a higher rank or more bits, or Guard("act").'


def strengths(plan: Plan) -> Iterator[Plan]:
    """Yield ever stronger plans, each of which sends about twice as much as the one before.

    First the codec gets more bits or rank, then it is exact, then the period is halved.

    >>> from laconic import power_sgd
    >>> list(strengths(power_sgd(rank=32, bits=2)))
    [power_sgd(rank=32, bits=4), power_sgd(rank=64, bits=4), power_sgd(rank=64, bits=8), ddp()]
    """
    found: Plan | None = plan
    while found is not None:
        if found is not plan:
            yield found
        is_exact = isinstance(found.codec, Exact)
        found = _half_period(found) if is_exact else replace(found, codec=_stronger_codec(found.codec) or Exact())


def _stronger_codec(codec: Any) -> Codec | None:
    """Return the codec with every codec in it one strength up; None if none has one."""
    for argument in _own_strengths(codec):
        try:
            raised: Codec = replace(codec, **argument)
            return raised
        except ValueError:  # bits that this codec does not have
            continue
    change: dict[str, Any] = {}
    if is_dataclass(codec):
        values = {f.name: getattr(codec, f.name) for f in fields(codec)}
        change = {name: found for name, value in values.items() if (found := _stronger_value(value)) is not None}
        if {"codec", "rest"} <= change.keys() and _bits(change["codec"]) == _bits(values["codec"]):
            del change["rest"]  # small tensors get more bits only with the others
    return replace(codec, **change) if change else None


def _own_strengths(codec: Any) -> Iterator[dict[str, Any]]:
    """Yield arguments that make a codec stronger, the best first."""
    bits = getattr(codec, "bits", None)
    if getattr(codec, "rounds", None) == "alternating":
        yield {"rounds": "two"}
    if bits is not None and bits < 4:
        yield {"bits": 2 * bits}
    if getattr(codec, "rank", _MOST_RANK) < _MOST_RANK:
        yield {"rank": min(_MOST_RANK, 2 * codec.rank)}
    if getattr(codec, "fraction", _MOST_FRACTION) < _MOST_FRACTION:
        yield {"fraction": min(_MOST_FRACTION, 2 * codec.fraction)}
    if bits is not None and 4 <= bits < _MOST_BITS:
        yield {"bits": 2 * bits}


def _bits(codec: object) -> object:
    """Return the bits of a codec, or of the codec that it wraps."""
    return getattr(codec, "bits", None) if not hasattr(codec, "codec") else _bits(codec.codec)


def _stronger_value(value: object) -> Any:
    if isinstance(value, Mapping):
        found = {key: _stronger_value(each) for key, each in value.items()}
        raised = any(each is not None for each in found.values())
        return {key: each or value[key] for key, each in found.items()} if raised else None
    return _stronger_codec(value) if isinstance(value, Codec) else None


def _half_period(plan: Plan) -> Plan | None:
    """Return the plan with half its period; None where weights are averaged at every step, or the schedule has none."""
    schedule = plan.schedule
    half = schedule.period // 2
    if not half:
        return None
    shorter: Schedule
    if isinstance(schedule, Every):
        shorter = replace(schedule, period=half, of="weights")
    elif isinstance(schedule, Streaming):
        shorter = replace(
            schedule, period=half, fragments=min(schedule.fragments, half), delay=min(schedule.delay, half - 1)
        )
    elif isinstance(schedule, Nested):  # of two groups with one period, the larger counts
        shorter = replace(schedule, groups={max(1, period // 2): size for period, size in schedule.groups.items()})
    elif isinstance(schedule, Quadratic):
        shorter = replace(schedule, growth=schedule.growth / math.sqrt(2), floor=half)
    else:
        return None
    return replace(plan, schedule=shorter)


class Signs:
    """Random signs of +1 and -1 by the name of a tensor, the same on all workers; others at each step."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, torch.device], Tensor] = {}

    def of(self, name: str, count: int, device: torch.device, step: int = 0) -> Tensor:
        """Return `count` signs, [count] in fp32: of a longer row of signs, those from a place that moves on."""
        key = (name, count, device)
        if key not in self._known:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1
            drawn = torch.randint(0, 2, (count + _TURNS,), generator=torch.Generator().manual_seed(seed))
            self._known[key] = (2 * drawn - 1).float().to(device)
        return self._known[key][step % _TURNS :][:count]

    @torch.no_grad()
    def sketch(self, tensors: Mapping[str, Tensor], step: int, device: torch.device) -> Tensor:
        """Return the sketch of some tensors, [SKETCH] in fp32."""
        sums = torch.zeros(SKETCH, device=device)
        for name, t in tensors.items():
            flat = t.detach().reshape(-1)
            rows, wide = flat.numel() // SKETCH, wide_dtype(flat.dtype)
            signs = self.of(name, rows + 1, flat.device, step)
            block = max(1, rows if flat.dtype == wide else _BLOCK)
            for at in range(0, rows, block):  # in fp32 or wider: sums of fp16 would overflow
                some = flat[at * SKETCH : min(at + block, rows) * SKETCH].view(-1, SKETCH).to(wide)
                sums += (signs[at : at + len(some)].to(wide) @ some).to(sums)
            tail = flat[rows * SKETCH :]
            sums[: tail.numel()] += (signs[rows] * tail.float()).to(device)
        return sums


@dataclass(frozen=True, eq=False)
class Measurement:
    """The sketches of what is averaged in one step, or in one period of a streaming plan: then of all fragments.

    `last` is the step of its last exchange, and `due` the step after which that has ended on every worker.
    """

    last: int
    due: int
    signs: Signs
    of_gradients: bool = False
    sums: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    """For the names of each exchange, [3, SKETCH]: of what was to be sent, of residuals before, and after. If a step
    averages them several times, the last."""

    @classmethod
    def of(cls, plan: Plan, step: int, signs: Signs) -> Measurement:
        """Begin a measurement with the exchanges of a step."""
        schedule = plan.schedule
        if not isinstance(schedule, Streaming) or step < schedule.start:
            return cls(step, step, signs, plan.syncs_at(step) == GRADIENTS)
        last = step if schedule.fragments == 1 else step + schedule.period - 1
        return cls(last, last + schedule.delay, signs)

    def row(self) -> list[int]:
        """Return how many exchanges were sketched, and the sums of their sketches as int64 numbers, to gather."""
        sums = list(self.sums.values())
        total = sum((each.cpu() for each in sums), torch.zeros(3, SKETCH))
        return [len(sums), *_packed(total)]


def largest(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the names of the tensors that are sketched."""
    return tuple(sorted(tensors, key=lambda name: (-tensors[name].numel(), name))[:MOST_TENSORS])


@dataclass(frozen=True, eq=False)
class SketchCodec:
    """A codec whose exchanges are sketched for a measurement."""

    codec: Codec
    measurement: Measurement

    def accepts(self, shape: torch.Size) -> bool:
        """Accept what the codec accepts."""
        return self.codec.accepts(shape)

    def average(
        self, tensors: Mapping[str, Tensor], state: State, peers: Peers, *, reuse: bool = False
    ) -> Exchange[Averaged]:
        """Average through the codec, and sketch what it is given and what it leaves."""
        names, to = largest(tensors), self.measurement
        device = tensors[names[0]].device if names else torch.device("cpu")
        sketch = partial(to.signs.sketch, step=to.last, device=device)
        own, before = sketch({name: tensors[name] for name in names}), sketch(_residuals_of(names, state))
        end = yield from self.codec.average(tensors, state, peers, reuse=reuse)
        to.sums[names] = torch.stack([own, before, sketch(_residuals_of(names, state))])
        return end


def health_of(rows: Sequence[Sequence[int]], step: int) -> Health | None:
    """Compute the health from the rows of all workers, bit for bit the same wherever it is computed.

    None if nothing was averaged, or if an exchange of some worker was dropped.
    """
    counts = {row[0] for row in rows}
    if len(counts) > 1 or 0 in counts:
        return None
    gradient, before, after = zip(*(_sketches(row[1:]) for row in rows), strict=True)
    health = gradient_health(gradient, step)
    norm, lag = health.norm, _norm(_mean(after))
    wanted = _norm([a + b for a, b in zip(_mean(gradient), _mean(before), strict=True)])
    return replace(health, residual=lag / norm if norm else 0.0, error=lag / wanted if wanted else 0.0)


def gradient_health(sketches: Sequence[Sequence[float]], step: int) -> Health:
    """Compute the health from the sketches of all workers' gradients or deltas alone, as if none were ever late."""
    norm = _norm(_mean(sketches))
    own = math.fsum(_norm(each) ** 2 for each in sketches) / len(sketches)
    agreement = norm * norm / own if own else 1.0
    drift = math.sqrt(max(0.0, own - norm * norm))
    return Health(step, residual=0.0, error=0.0, agreement=agreement, norm=norm, drift=drift)


def _packed(sketches: Tensor) -> list[int]:
    """Return the fp32 numbers of sketches as int64 numbers, two each, to gather."""
    bits: list[int] = sketches.cpu().reshape(-1).view(torch.int64).tolist()
    return bits


def _sketches(row: Sequence[int]) -> list[list[float]]:
    """Return the sketches that `_packed` made numbers of."""
    numbers = torch.tensor(row, dtype=torch.int64).view(torch.float32)
    found: list[list[float]] = numbers.view(2 * len(row) // SKETCH, SKETCH).tolist()
    return found


def _mean(sketches: Sequence[Sequence[float]]) -> list[float]:
    return [math.fsum(column) / len(sketches) for column in zip(*sketches, strict=True)]


def _norm(sketch: Sequence[float]) -> float:
    if not all(map(math.isfinite, sketch)):
        return math.nan
    return math.sqrt(math.fsum(x * x for x in sketch))


def _residuals_of(names: Sequence[str], state: State) -> dict[str, Tensor]:
    residuals = residuals_by_name(state)
    return {name: residuals[name] for name in names if name in residuals}
