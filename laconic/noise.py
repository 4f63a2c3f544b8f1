"""The gradient noise scale: how much more workers can give a training, measured while it runs.

Each of n workers has a gradient G + noise in a step. Two numbers tell both parts apart, without bias: `own`, the mean
of the workers' squared norms, and `mean`, the squared norm of their mean:

    |G|² = (n mean − own) / (n − 1)        variance = own − |G|²

Their ratio B = variance / |G|² is the simple noise scale of McCandlish et al. 2018, arXiv:1812.06162, appendix A, in
batches of one worker. A step of n workers makes 1 / (1 + B / n) of the progress of one without noise, so n workers are
worth (1 + B) / (1 + B / n) that train by themselves: n under much noise, 1 without any.
"""

from __future__ import annotations

from math import isfinite

MOST_NOISE = 1000.0
"""The largest noise that is reported: beyond it, |G|² is lost in the noise of its own measurement."""
LEAST_WORTH = 1.15
"""Workers that are worth less together should train alone: the link and the wait for the slowest cost more."""
_KEPT = 0.98
"""The weight of what was measured before each measurement: the averages are over about 50."""
_FEWEST = 8
"""Measurements before the first result."""


def worth(noise: float, workers: int) -> float:
    """Return how many workers, each by itself, make the progress of so many that average, under this noise.

    >>> worth(9.0, workers=4), worth(0.0, workers=4)
    (3.076923076923077, 1.0)
    """
    return (1 + noise) / (1 + noise / workers)


class NoiseAverage:
    """The noise over many steps: the ratio of the averages of variance and |G|², as one step tells little of |G|².

    >>> average = NoiseAverage()
    >>> for _ in range(8):
    ...     average.add(own=10.0, mean=3.25, workers=4)
    >>> average.noise
    9.0
    """

    def __init__(self) -> None:
        self._signal = self._variance = 0.0
        self._measured = 0

    def add(self, own: float, mean: float, workers: int) -> None:
        """Add a measurement, unless it is not finite: `own` and `mean` as above. One worker has nothing to compare."""
        signal = (workers * mean - own) / (workers - 1) if workers > 1 else float("nan")
        if isfinite(signal):
            self._signal = _KEPT * self._signal + signal
            self._variance = _KEPT * self._variance + own - signal
            self._measured += 1

    @property
    def noise(self) -> float | None:
        """The noise scale B in batches of one worker, from 0 to MOST_NOISE; None until there are measurements."""
        if self._measured < _FEWEST:
            return None
        return max(0.0, self._variance) / max(self._signal, self._variance / MOST_NOISE) if self._variance > 0 else 0.0
