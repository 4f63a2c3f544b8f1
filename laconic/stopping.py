"""Stopping together: one worker is told to end, and all end after the same step.

A launcher that takes a machine away sends SIGTERM, and SIGKILL half a minute later. Whoever is told only notes it; the
workers hear of it when they meet anyway, before a round of weights or at a step that averages gradients, and so all of
them know it after the same step.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from types import FrameType

import torch

from laconic.replica import flags
from laconic.wires.group import Conductor


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

    def hear(self, conductor: Conductor) -> None:
        """Ask all workers whether anyone was asked to stop."""
        mine = torch.tensor([float(self.asked)], device=conductor.device)
        if conductor.workers > 1:
            mine = conductor.run(flags(mine), "control").mean["flags"]
        self.agreed = self.agreed or bool(mine.any())
