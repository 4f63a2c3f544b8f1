"""The time of a step against the rate of the slowest link: a line for each plan, and where another becomes the lowest.

It needs matplotlib: pip install "laconic[report]".
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from laconic.atomic_write import write_atomically
from laconic.tools.planner.predict import Prediction
from laconic.tools.units import rate_text

OCTAVES = range(-40, 41)  # quarters of one


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Write the picture, in the format that the file's ending names."""
    from matplotlib.figure import Figure

    network = predictions[0].scenario.network
    rates = [network.rate_bps * 2 ** (octave / 4) for octave in OCTAVES]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    curves = []
    for each in predictions:
        curve = [each.timeline(network.faster(2 ** (octave / 4))).step_s for octave in OCTAVES]
        curves.append(curve)
        axes.plot(rates, curve, label=repr(each.plan))
    for index in crossings(curves):
        seconds = min(curve[index] for curve in curves)
        axes.plot(rates[index], seconds, "o", color="black", markersize=5)
        axes.annotate(rate_text(float(f"{rates[index]:.2g}")), (rates[index], seconds), fontsize=8, va="bottom")
    axes.axvline(network.rate_bps, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xscale="log", yscale="log", xlabel="slowest link, bit/s", ylabel="seconds a step")
    axes.legend(fontsize=8)
    made = io.BytesIO()
    figure.savefig(made, format=path.suffix.lstrip(".") or "svg")
    write_atomically(path, made.getvalue())


def crossings(curves: Sequence[Sequence[float]]) -> list[int]:
    """Return the places at which another curve becomes the lowest.

    >>> crossings([[1, 2, 3, 4], [3, 2.5, 2, 1]])
    [2]
    """
    lowest = [min(range(len(curves)), key=lambda which: curves[which][place]) for place in range(len(curves[0]))]
    return [place for place in range(1, len(lowest)) if lowest[place] != lowest[place - 1]]
