"""Rounds that end by the clock: what a worker counts under a plan such as `diloco(every="30s")`.

Workers take different numbers of steps in such a round. What all of them count alike is the round: headers compare it
in the place of the step, and they tell how many steps each worker has taken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import monotonic

from torch import nn

from laconic.checks.headers import Headers
from laconic.plans.plan import Plan
from laconic.plans.schedules import Timed


@dataclass(eq=False)
class Rounds:
    """The rounds of one worker."""

    ended: int = 0
    """How many all workers have ended."""
    taken: int = 0
    """How many steps this worker has taken in this one, without those that it has skipped."""
    progress: float = 0.0
    """The mean of all workers' steps, up to the end of the last round."""
    _began_s: float = field(default_factory=lambda: monotonic())

    @property
    def elapsed_s(self) -> float:
        """How long ago this round began."""
        return monotonic() - self._began_s

    def begin(self) -> None:
        """Begin a round: all workers have just left a synchronisation."""
        self.taken = 0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Count the time of the round from now on."""
        self._began_s = monotonic()

    def received(self, headers: Headers) -> None:
        """End the round: every worker has told how many steps it has taken."""
        self.ended += 1
        self.progress += sum(each.taken or 0 for each in headers.all) / len(headers.all)

    def state_dict(self) -> dict[str, float]:
        """Return the numbers. The time is not among them."""
        return {"ended": self.ended, "taken": self.taken, "progress": self.progress}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Load what `state_dict` returned."""
        self.ended, self.taken, self.progress = int(saved["ended"]), int(saved["taken"]), saved["progress"]


def check_rounds(plan: Plan, model: nn.Module, sharded: bool) -> None:
    """Refuse rounds by time where workers must take each step together."""
    if not isinstance(plan.schedule, Timed):
        return
    together = "the shards of one replica" if sharded else ""
    if any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        together = "SyncBatchNorm"
    if together:
        raise ValueError(
            f"{plan!r}: {together} must be computed in the same steps on all workers, and a round by time ends at "
            "another step on each. Choose rounds by steps, such as diloco(period=16)."
        )
