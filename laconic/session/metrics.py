"""The metrics of a session: one table of their names.

    session.metrics()["wire_bytes/world/gradient/all_reduce"]

All numbers are this worker's own, and nothing is sent for them. docs/metrics.md shows the table, and
`laconic.integrations.log` writes it to files and tools.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from torch import Tensor
from torch.nn.utils import get_total_norm

from laconic.codecs.feedback import residuals_by_name
from laconic.session.observers import StepObserver, Validation

if TYPE_CHECKING:
    from laconic.session.session import Session

Kind: TypeAlias = Literal["counter", "gauge"]


@dataclass(frozen=True)
class Metric:
    """What is measured. A counter never falls within a session; `unit` is UCUM's: By, s, or "" for a plain number."""

    name: str
    kind: Kind
    help: str
    unit: str = ""
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Health:
    """What a synchronisation delivered, the same on all workers. "Mean" is the mean over the workers."""

    step: int
    residual: float
    """The norm of the mean residual over that of the mean gradient, or delta: how many steps or rounds lag behind."""
    error: float
    """The norm of the mean residual over that of what was to be sent, gradient plus old residual: 0 to about 1."""
    agreement: float
    """The squared norm of the mean gradient, or delta, over the mean of the workers' squared norms: 1 if all are the
    same, 1 / workers if they have nothing in common."""
    norm: float
    """The norm of the mean gradient, or delta; of scaled gradients on a DDP or sharded model under a GradScaler."""
    drift: float
    """The distance of the workers' gradients, or deltas, from their mean: root mean square. Of deltas it is how far
    the workers' weights are from their mean."""
    noise: float | None = None
    """The gradient noise scale: the variance of a worker's gradient over the squared norm of the true one. Both are
    averaged over many steps; None until enough are measured."""
    worth: float | None = None
    """How many workers, each training by itself, the workers are worth together at most, under this noise."""

    @property
    def finite(self) -> bool:
        """Whether all numbers are finite; a step with NaN is no measurement."""
        return all(map(math.isfinite, (self.residual, self.error, self.agreement, self.norm, self.drift)))


_LABELS = ("level", "phase", "op")
_WHAT = "gradients or deltas"
METRICS = {
    metric.name: metric
    for metric in (
        Metric("step", "gauge", "Optimizer steps of the run, those before a resume included."),
        Metric("workers", "gauge", "Workers that synchronise."),
        Metric("wire_bytes", "counter", "Bytes that this worker has sent.", "By", _LABELS),
        Metric("payload_bytes", "counter", "Bytes that this worker has passed to collectives.", "By", _LABELS),
        Metric("collectives", "counter", "Collectives of this worker.", "", _LABELS),
        Metric("flight_seconds", "counter", "Seconds in flight; concurrent collectives count each.", "s", _LABELS),
        Metric("wait_seconds", "counter", "Seconds for which training stood still until exchanges ended.", "s"),
        Metric("residual_norm", "gauge", "Norm of the residuals that error feedback keeps here.", "", ("phase",)),
        Metric("health_residual", "gauge", f"Norm of the mean residual, in mean {_WHAT}."),
        Metric("health_error", "gauge", "Share of what was to be sent that was not."),
        Metric(
            "health_agreement",
            "gauge",
            f"1 if all workers' {_WHAT} are equal, 1 / workers if they have nothing in common.",
        ),
        Metric("health_norm", "gauge", f"Norm of the mean of the workers' {_WHAT}."),
        Metric("health_drift", "gauge", f"Distance of the workers' {_WHAT} from their mean, root mean square."),
        Metric("health_noise", "gauge", "Gradient noise scale, in batches of one worker."),
        Metric("health_worth", "gauge", "How many workers the workers are worth together at most, under this noise."),
        Metric("loss", "gauge", "Training loss that session.report was given last."),
        Metric("validation_loss", "gauge", "Validation loss that session.report was given last."),
    )
}
LOSSES = ("loss", "validation_loss")


class Reported(StepObserver):
    """Keeps the last losses of `session.report`. A loss on a GPU stays there until it is read."""

    def __init__(self) -> None:
        self.last: dict[str, float | Tensor] = {}

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None) -> bool:
        """Keep the losses. A function that computes one is not called: it may need all workers."""
        for name, value in zip(LOSSES, (loss, validation), strict=True):
            if isinstance(value, Tensor):
                self.last[name] = value.detach()
            elif value is not None and not callable(value):
                self.last[name] = value
        return False


def metrics_of(session: Session) -> dict[str, float]:
    """Return the session's metrics by name and labels. Waits for a GPU if there are residuals or losses on it."""
    found: dict[str, float] = {"step": session.step, "workers": session.workers}
    for (op, level, phase), total in session.ledger.all_totals().items():
        labels = f"{level}/{phase}/{op}"
        found[f"wire_bytes/{labels}"] = total.wire_bytes
        found[f"payload_bytes/{labels}"] = total.payload_bytes
        found[f"collectives/{labels}"] = total.collectives
        found[f"flight_seconds/{labels}"] = total.seconds
    found["wait_seconds"] = session.ledger.waited_s
    for phase in ("gradient", "weights"):
        residuals = list(residuals_by_name(session._live.state[phase]).values())
        if residuals:
            found[f"residual_norm/{phase}"] = float(get_total_norm(residuals))
    health = {} if session.health is None else asdict(session.health)
    found |= {f"health_{name}": value for name, value in health.items() if name != "step" and value is not None}
    return found | {name: float(value) for name, value in session._reported.last.items()}
