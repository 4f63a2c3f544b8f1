"""Stopping together: one worker is told to end, and all end after the same step.

A launcher that takes a machine away sends SIGTERM, and SIGKILL half a minute later. Whoever is told only notes it; the
workers hear of it when they meet anyway, before a round of weights or at a step that averages gradients, and so all of
them know it after the same step.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType


@dataclass(eq=False)
class Stop:
    """Whether this worker was asked to stop, and whether all workers know of somebody who was."""

    watched: bool = False
    asked: bool = False
    agreed: bool = False

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
