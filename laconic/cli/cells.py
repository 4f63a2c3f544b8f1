"""A worker's progress in words: the cells of the moving table, and the plain line."""

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.compare.reporting import Progress
from laconic.compare.units import human_bytes

BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Cells:
    """A progress in words."""

    step: str
    loss: str
    tokens: str
    talking: str
    sent: str
    rate: str
    left: str


def cells_of(progress: Progress) -> Cells:
    """The words for each number."""
    seconds = progress.seconds or 1.0
    return Cells(
        step=f"{progress.step}/{progress.steps}" if progress.steps else str(progress.step),
        loss=f"{progress.loss:.3f}",
        tokens=f"{progress.tokens_per_s:,.0f}",
        talking=f"{progress.talking_s / seconds:.0%}",
        sent=human_bytes(progress.sent_bytes),
        rate=f"{progress.wire_bytes / seconds / 1e6:.2f}",
        left=_left(progress),
    )


def _left(progress: Progress) -> str:
    if progress.ended:
        return "done"
    return f"{progress.seconds_left:.0f}s" if progress.steps or progress.seconds_limit else "-"


def plain_line(label: str, progress: Progress) -> str:
    """The progress as one line of words and values.

    >>> now = Progress(worker=0, step=1, steps=3, loss=5.5, tokens_per_s=900, sent_bytes=8, seconds=2, talking_s=1)
    >>> plain_line("ddp()", now)
    'ddp() step=1/3 loss=5.500 tokens/s=900 talking=50% sent=8 B MB/s=0.00 left=4s'
    """
    cells = cells_of(progress)
    numbers = f"loss={cells.loss} tokens/s={cells.tokens} talking={cells.talking} sent={cells.sent}"
    return f"{label} step={cells.step} {numbers} MB/s={cells.rate} left={cells.left}"


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, from their lowest to their highest, averaged where there are more of them than room.

    >>> sparkline([3, 2, 2, 1], width=4)
    '█▅▅▁'
    """
    finite = [value for value in values if abs(value) != float("inf") and value == value]
    if not finite:
        return ""
    width = min(width, len(finite))
    means = [_mean(finite[i * len(finite) // width : (i + 1) * len(finite) // width]) for i in range(width)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BARS[round((value - low) / span * (len(BARS) - 1))] for value in means)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
