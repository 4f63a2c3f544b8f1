"""Stopping together: one worker gets a signal, and all workers stop after the same step.

A launcher that takes a machine away sends SIGTERM, and SIGKILL half a minute later. The signal handler only sets a
flag. The flag is sent in the headers that workers exchange anyway, before weights and before the gradients of a bare
module; DDP and sharded models exchange a header for it about twice a second.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from laconic.checks.headers import Header, Headers
from laconic.plans.plan import Plan
from laconic.plans.schedules import Never
from laconic.session.live_model import LiveModel
from laconic.session.rounds import Rounds

MOST_STEPS = 64
"""After how many steps at most models that average gradients in backward exchange headers under `stop_on`."""


@dataclass(eq=False)
class Stop:
    """Whether this worker was asked to stop, and whether all workers know that some worker was."""

    watched: bool = False
    every_s: float = 0.5
    asked: bool = False
    agreed: bool = False
    _due: int = 0
    """The step of the next exchange of headers."""
    _last: tuple[int, float] | None = None
    """The step of the last exchange, and its time."""

    def on(self, signals: Sequence[signal.Signals], every_s: float) -> None:
        """Take these signals as a request to stop."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"stop_on({', '.join(each.name for each in signals)}) in thread {threading.current_thread().name!r}: "
                "Python sets signal handlers in the main thread alone. Call it there, after attach."
            )
        self.watched, self.every_s = True, every_s
        for each in signals:
            signal.signal(each, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def is_due(self, step: int) -> bool:
        """Return whether headers are exchanged in this step."""
        return self.watched and step >= self._due

    def step_ms(self, step: int) -> int:
        """Return how long a step takes on this worker; 0 if unknown."""
        if self._last is None or step <= self._last[0]:
            return 0
        return max(1, round(1000 * (time.monotonic() - self._last[1]) / (step - self._last[0])))

    def exchanged(self, step: int, slowest_ms: int) -> None:
        """Set the step of the next exchange, from the duration of the slowest worker, the same on all."""
        self._last = (step, time.monotonic())
        steps = 1000 * self.every_s / slowest_ms if slowest_ms else 1
        self._due = step + max(1, int(min(MOST_STEPS, steps)))

    def restart(self) -> None:
        """Exchange headers at the next step, whichever that is."""
        self._due, self._last = 0, None


@dataclass(eq=False)
class StepHeaders:
    """Makes this worker's headers for the step that comes next."""

    plan: Plan
    live: LiveModel
    stop: Stop
    step: int = 1
    stop_due: bool = False
    """Whether a header is exchanged beside gradients in this step, only to stop together."""
    rounds: Rounds | None = None
    """Where rounds end by the clock."""

    def begin_step(self, plan: Plan, step: int, among_all: bool) -> None:
        """Make headers of this step from now on, in which all workers average gradients or not."""
        self.plan, self.step = plan, step
        self.stop_due = among_all and self.stop.is_due(step)
        if isinstance(plan.schedule, Never):  # no header carries it to the others
            self.stop.agreed = self.stop.agreed or self.stop.asked

    def header(
        self, *, finite: bool = True, with_gradient: int = 0, step_ms: int = 0, count: int | None = None
    ) -> Header:
        """Make a header."""
        number, taken = self.step, None
        if self.rounds is not None and self.step >= self.plan.schedule.start:
            number, taken = self.rounds.ended + 1, self.rounds.taken
            count = taken if count is None else count
        model = self.live.facts
        return Header(number, self.plan.text, model, finite, self.stop.asked, with_gradient, step_ms, count, taken)

    def stop_header(self, count: int | None = None) -> Header:
        """Make a header that says how long steps take."""
        return self.header(step_ms=self.stop.step_ms(self.step), count=count)

    def received(self, headers: Headers, among_all: bool) -> None:
        """Note whether some worker was asked to stop. Only what all workers receive after the same step counts."""
        self.stop.agreed = self.stop.agreed or (headers.stop and among_all)
        if self.rounds is not None and headers.all[0].taken is not None:
            self.rounds.received(headers)
