"""The results of simulated trainings, as they are shown and written."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from laconic.tools.simulate.clock import TimeUse
from laconic.tools.simulate.training import SimulatedStep, Training


@dataclass(frozen=True)
class SimulatedOutcome:
    """A simulated training: its steps, without those that faults have undone, and its validation loss at the end."""

    plan: str
    workers: int
    left: int
    """The workers that were not lost."""
    parameters: int
    curve: tuple[SimulatedStep, ...]
    validation_loss: float | None
    level_bytes: dict[str, int]
    """What worker 0, or the first that is left, has sent by level."""
    use: TimeUse

    @property
    def last(self) -> SimulatedStep:
        """The last step."""
        return self.curve[-1]

    @property
    def step_s(self) -> float:
        """The mean virtual seconds of a step."""
        return self.last.seconds / self.last.step


def outcome_of(training: Training, steps: list[SimulatedStep]) -> SimulatedOutcome:
    """Gather the results of a training that has ended."""
    run = training.run
    return SimulatedOutcome(
        plan=repr(run.plan),
        workers=run.workers,
        left=len(training.alive),
        parameters=sum(p.numel() for p in training.task.model.parameters() if p.requires_grad),
        curve=tuple({each.step: each for each in steps}.values()),
        validation_loss=training.validation_loss(),
        level_bytes=training.level_bytes(),
        use=training.clock.use(),
    )


def as_object(outcome: SimulatedOutcome) -> dict[str, Any]:
    """Return what is written of an outcome as JSON."""
    curve = [asdict(each) | {"loss": each.loss} for each in outcome.curve]
    last = outcome.last
    totals = {"steps": last.step, "loss": last.loss, "seconds": last.seconds, "sent_bytes": last.sent_bytes}
    return asdict(outcome) | totals | {"step_s": outcome.step_s, "utilisation": outcome.use.computing, "curve": curve}
