"""The guard: notices that a plan loses too much of what it averages, and goes on with a stronger one.

    session = laconic.attach(plan, model, optimizer, guard="act")

Every few steps it measures `session.health`. Error feedback delivers late what a codec loses; a codec that is too weak
falls behind by more than a step of gradients, and the model then trains on old news. That is the alarm, in two
measurements in a row. The guard only ever makes a plan stronger, so it cannot oscillate.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from laconic.cost import sent_bytes
from laconic.plans.methods import ddp
from laconic.plans.plan import Plan
from laconic.plans.stronger import strengths
from laconic.session.carry_over import PARTS
from laconic.session.health import Health, Sketcher, health_of
from laconic.session.observers import StepObserver
from laconic.values import as_code, is_number, is_whole

if TYPE_CHECKING:
    from laconic.session.gradients import GradientPath
    from laconic.session.session import Session

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["off", "warn", "act"]
_IN_A_ROW = 2
"""Measurements above the limit that are an alarm: one may be a short gradient."""
_FALL = 0.7
"""Residuals fall with the rank as rank ** -0.7 (docs/log.md, 2026-11-16)."""
_AIM = 3
"""A stronger plan should be below the limit by this factor: a plan that is just below it loses, too."""


@dataclass(frozen=True, repr=False)
class Guard:
    """What the guard does: "off" measures nothing, "warn" logs, "act" also makes the plan stronger.

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
            raise ValueError(f'attach(guard={self.mode!r}): it must be "off", "warn", "act", or a laconic.Guard(...).')
        if not is_number(self.budget) or not 0 < self.budget <= 1:
            raise ValueError(
                f"Guard(budget={self.budget!r}): it is a share of the bytes of ddp(), above 0 and at most 1."
            )
        if not is_number(self.limit) or self.limit <= 0:
            raise ValueError(f"Guard(limit={self.limit!r}): it must be a number above 0, such as 1.5.")
        if not is_whole(self.every):
            raise ValueError(f"Guard(every={self.every!r}): it must be a whole number of steps, such as 8.")


def guard_of(given: Guard | str, sharded: bool) -> Guard:
    """Return the guard that `attach` was given, or refuse it."""
    guard = given if isinstance(given, Guard) else Guard(mode=given)  # type: ignore[arg-type]
    if sharded and guard.mode == "act":
        raise ValueError(
            f"attach(guard={given!r}): on a sharded model the workers of each shard would decide for themselves. "
            'Use guard="warn", and session.change(plan) on all workers.'
        )
    return guard


class GuardObserver(StepObserver):
    """Measures, logs and acts, at the same steps on all workers."""

    def __init__(self, guard: Guard, probe: Sketcher, path: GradientPath) -> None:
        self._guard = guard
        self._probe = probe
        self._path = path
        self._last = 0
        """The step of the last measurement."""
        self._recent: deque[Health] = deque(maxlen=_IN_A_ROW)
        self._told: Plan | None = None
        """The plan of which the log has said that it is too weak."""

    def attached(self, session: Session) -> None:
        """Measure for the first time after `every` steps."""
        self._last = session.step
        self._probe.due = self._guard.every == 1

    def after_step(self, session: Session) -> None:
        """Take a measurement, if one was made. A fragment in flight is not complete on all workers."""
        if self._path.joining:  # some workers may have run out of data: nobody gathers
            self._probe.take()
            self._probe.due = False
            return
        if not session.in_flight:
            row = self._probe.take()
            if row:
                self._measured(session, health_of(session.gather(row), session.step))
        self._probe.due = session.step + 1 - self._last >= self._guard.every

    def _measured(self, session: Session, health: Health) -> None:
        self._last = session.step
        if not health.finite:
            return
        session.health = health
        session.ledger.note("health", health.step, asdict(health))
        self._recent.append(health)
        lags = [each.residual for each in self._recent]
        if len(lags) == _IN_A_ROW and min(lags) > self._guard.limit:
            self._alarm(session, max(lags))

    def _alarm(self, session: Session, lag: float) -> None:
        old = session.plan
        new = stronger_within(self._guard, session, lag) if self._guard.mode == "act" else None
        first, self._told = self._told != old, old
        if new is not None:
            self._recent.clear()
            session.change(new)
            self._last = session.step + PARTS  # until the residuals that are carried over are delivered
        speaks = session.group is None or session.group.rank() == 0
        if speaks and (new is not None or first):
            logger.warning("%s", _message(self._guard, session.step, lag, old, new))


def stronger_within(guard: Guard, session: Session, lag: float) -> Plan | None:
    """Return the plan that should bring a residual of `lag` gradients well below the limit, or the strongest below it
    that the budget allows; None if it allows none.
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
    return f'{why}. It trains on old gradients: use a higher rank or more bits, or guard="act".'
