"""What one worker sends at a step, as predictions use it."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.tools.planner.collectives import NetworkTimes


@dataclass(frozen=True)
class Sent:
    """What one worker sends of one bucket: at which step of the cycle, when in it, and to how many workers."""

    step: int
    before: float | None
    """The share of the model before it in the forward pass; None if it is sent after the step."""
    share: float
    """Its share of the model's parameters."""
    level: str
    workers: int
    collectives: tuple[tuple[str, float, float], ...]
    """Operation, bytes passed to it, bytes sent."""
    delay: int
    encoded: bool

    @property
    def wire_bytes(self) -> float:
        """The bytes that are sent."""
        return sum(sent for _, _, sent in self.collectives)

    def seconds(self, network: NetworkTimes) -> float:
        """Return the seconds of the collectives on a network."""
        return sum(network.seconds(op, payload, self.workers) for op, payload, _ in self.collectives)
