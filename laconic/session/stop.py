"""Stopping together: one worker is told to end, and all end after the same step.

A launcher that takes a machine away sends SIGTERM, and SIGKILL half a minute later. Whoever is told only notes it; the
workers hear of it when they meet anyway, before a round of weights or at a step that averages gradients, and so all of
them know it after the same step.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from types import FrameType

EVERY_MS, MOST_STEPS = 500, 64
"""How often workers that average gradients ask each other."""


@dataclass(eq=False)
class Stop:
    """Whether this worker was asked to stop, and whether all workers know of somebody who was."""

    watched: bool = False
    asked: bool = False
    agreed: bool = False
    _due: int = 0
    """The step at which workers that average gradients ask each other next."""
    _last: tuple[int, float] | None = None
    """The step at which they did so last, and when that was."""

    def on(self, *signals: signal.Signals) -> None:
        """Take these signals as being asked."""
        self.watched = True
        for each in signals:
            signal.signal(each, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def heard(self, anyone: bool, among_all: bool) -> None:
        """Take note of what a header said. A part of the workers decides nothing: all must know after the same step."""
        self.agreed = self.agreed or (anyone and among_all)

    def is_due(self, step: int) -> bool:
        """Whether to ask in this step: about twice a second, as a message at every step would be felt."""
        return self.watched and step >= self._due

    def pace_ms(self, step: int) -> int:
        """How long a step takes here, as far as is known."""
        if self._last is None or step <= self._last[0]:
            return 0
        return max(1, round(1000 * (time.monotonic() - self._last[1]) / (step - self._last[0])))

    def has_asked(self, step: int, slowest_ms: int) -> None:
        """Note when to ask again, from the clock of the slowest worker, which all have heard alike."""
        self._last = (step, time.monotonic())
        self._due = step + max(1, min(MOST_STEPS, EVERY_MS // slowest_ms if slowest_ms else 1))

    def begin_anew(self) -> None:
        """Ask at the next step, whichever that is."""
        self._due, self._last = 0, None
