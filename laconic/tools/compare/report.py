"""The report of a comparison: one self-contained HTML file for any screen, light or dark, with the raw data in it.

Matplotlib draws its figures, in a size that is readable on a phone, and Jinja fills `report.html`; both are imported
only when a report is written. In the page, variables of its style sheet replace the colours of the figures.
"""

from __future__ import annotations

import base64
import datetime
import io
import math
import os
import platform
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.atomic_write import write_atomically
from laconic.tools.compare.judging import as_json, cells, headline, no_better_than_alone, reference
from laconic.tools.compare.runs import Outcome, Point
from laconic.tools.errors import UsageError
from laconic.tools.machine import pip_install, usable_cores, versions
from laconic.tools.units import duration, human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = Path(__file__).with_name("report.html")
INCHES = (4.4, 3.0)
LINE_STYLES, SWATCHES = ("-", "--", "-.", ":"), ("solid", "dashed", "dashed", "dotted")
INK, FAINT = "#1b1f24", "#d5d9de"
PLANS = {
    "#4c5560": "#b6bec8",
    "#0072b2": "#5cb3ec",
    "#d55e00": "#ff9657",
    "#00835f": "#3fcf9f",
    "#a64d86": "#e59ccb",
    "#8a6d00": "#e3c34d",
}
"""The colours of plans in light and in dark."""
PARTS = {"computing": "#6f9a78", "communicating": "#cfa52a", "waiting": "#b7a3dd"}
LIGHT = {f"plan-{i}": colour for i, colour in enumerate(PLANS)} | {f"part-{i}": c for i, c in enumerate(PARTS.values())}
DARK = dict(zip(LIGHT, (*PLANS.values(), "#84b78e", "#e3c34d", "#9b86cc"), strict=True))
DETAILS = ("computing, s", "communicating, s", "waiting, s", "on the network", "at the interface")


def check_drawable(written: str) -> None:
    """Refuse a report before any training if its dependencies are not installed."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"{written}: its figures need {' and '.join(missing)}, which cannot be imported. "
            f"Install with {pip_install('report')}, or leave out the option."
        )


def write_page(path: Path, outcomes: Sequence[Outcome], arguments: Sequence[str]) -> None:
    """Write the report; `arguments` are those of the command."""
    write_atomically(path, page(outcomes, arguments).encode())


def page(outcomes: Sequence[Outcome], arguments: Sequence[str]) -> str:
    """The report as HTML."""
    from jinja2 import Environment, StrictUndefined

    first, rows = reference(outcomes), [cells(outcome, outcomes) for outcome in outcomes]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text()).render(
        headline=headline(outcomes),
        first=first,
        plans=[(outcome.label, SWATCHES[index % 4], index % 6) for index, outcome in enumerate(outcomes)],
        part_names=list(enumerate(PARTS)),
        figures=[(drawing, svg(drawing, outcomes)) for drawing in drawings(outcomes)],
        tables=[
            (
                "table",
                [heading.replace("\n", " ") for heading in rows[0]],
                [
                    (
                        outcome.label,
                        "no better than alone()" if no_better_than_alone(outcome, outcomes) else "",
                        [cell.replace("->", "→").replace("x", "×") for cell in row.values()],
                    )
                    for outcome, row in zip(outcomes, rows, strict=True)
                ],
            ),
            ("details", DETAILS, [(outcome.label, "", _details(outcome)) for outcome in outcomes]),
        ],
        uplinks=[(f"{o.plan}", name, human_bytes(count)) for o in outcomes for name, count in o.uplink_bytes.items()],
        command=shlex.join(["laconic", *arguments]),
        facts={**versions(), **machine()},
        data=base64.b64encode(as_json(outcomes).encode()).decode(),
        light=" ".join(f"--{name}: {colour};" for name, colour in LIGHT.items()),
        dark=" ".join(f"--{name}: {colour};" for name, colour in DARK.items()),
    )


def _details(outcome: Outcome) -> list[str]:
    """The cells of a run, as in DETAILS."""
    return [
        *(f"{part:,.1f}" for part in parts(outcome)),
        human_bytes(outcome.network_bytes),
        "-" if outcome.interface_bytes is None else human_bytes(outcome.interface_bytes),
    ]


def machine() -> dict[str, str]:
    """The machine, without its name."""
    found = {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{_processor()}, {usable_cores()} usable cores",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    if hasattr(os, "sysconf"):
        found["memory"] = human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


# The four figures.


@dataclass(frozen=True)
class Drawing:
    """A figure: its id in the page, its title, its caption, and the function that draws it."""

    name: str
    title: str
    note: str
    draw: Callable[[Axes, Sequence[Outcome]], None]


def drawings(outcomes: Sequence[Outcome]) -> list[Drawing]:
    """The figures of a comparison."""
    clock = "" if outcomes[0].clock == "measured" else " The time of the link is computed from the bytes."
    smooth = "Training loss, averaged over 8 steps and all workers."
    if all(outcome.validations for outcome in outcomes):
        smooth = "Validation loss of the averaged weights; of alone(), the mean over its workers."
    time_note = "Computing alone, communicating (a collective is in flight), and waiting for slower workers."
    return [
        Drawing("loss-time", "Loss against time", smooth + clock, _loss_against_time),
        Drawing("loss-bytes", "Loss against bytes", f"{smooth} Bytes that one worker sends.", _loss_against_bytes),
        Drawing("time", "Where the time went", time_note + clock, _where_the_time_went),
        Drawing("levels", "Bytes of each level", "Bytes that one worker sends at each level of the plan.", _levels),
    ]


def svg(drawing: Drawing, outcomes: Sequence[Outcome]) -> str:
    """Draw a figure as SVG for the page: colours are variables, text stays text, ids are unique."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laconic", "font.size": 10}):
        figure = Figure(figsize=INCHES, layout="constrained")
        drawing.draw(figure.add_subplot(), outcomes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    source = text.getvalue()
    source = source[source.index("<svg ") :].rstrip()
    source = re.sub(r"<metadata>.*?</metadata>", "", source, flags=re.DOTALL)
    source = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{drawing.name}-", source)
    source = re.sub(r"(\d)px ('DejaVu Sans'[^;\"]*)", r"\1px system-ui, sans-serif", source)
    accessible = f'role="img" aria-label="{drawing.title}"'
    source = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf"<svg \1 {accessible}>", source)
    for name, colour in {"ink": INK, "faint": FAINT, **LIGHT}.items():
        source = source.replace(colour, f"var(--{name})")
    return source


def parts(outcome: Outcome) -> tuple[float, float, float]:
    """The seconds of computing alone, communicating and waiting; their sum is the run's."""
    waiting = outcome.waiting_seconds
    return outcome.seconds - outcome.communication_seconds, outcome.communication_seconds - waiting, waiting


def _colour(plan: int) -> str:
    return LIGHT[f"plan-{plan % len(PLANS)}"]


def _loss_against_time(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    label = "seconds (link computed)" if outcomes[0].clock == "computed" else "seconds"
    _losses(axes, outcomes, [[point.seconds for point in points] for points in _curves(outcomes)], label)
    axes.xaxis.set_major_formatter("{x:g}")


def _curves(outcomes: Sequence[Outcome]) -> list[tuple[Point, ...]]:
    """The validation losses if all runs have them, else the training losses."""
    validated = all(outcome.validations for outcome in outcomes)
    return [outcome.validations if validated else outcome.curve for outcome in outcomes]


def _loss_against_bytes(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    sent = [[float(point.wire_bytes) for point in points] for points in _curves(outcomes)]
    _losses(axes, outcomes, sent, "bytes sent by each worker")
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))


def _losses(axes: Axes, outcomes: Sequence[Outcome], xs: Sequence[Sequence[float]], label: str) -> None:
    for index, (points, x) in enumerate(zip(_curves(outcomes), xs, strict=True)):
        pairs = zip(x, (point.loss for point in points), strict=True)
        shown = [(value, loss) for value, loss in pairs if value > 0 and math.isfinite(loss)]
        if shown:
            colour, style = _colour(index), LINE_STYLES[index % 4]
            axes.plot(*zip(*shown, strict=True), linestyle=style, linewidth=2, color=colour)
            axes.plot(*shown[-1], marker="o", markersize=5, linestyle="none", color=colour)
    if axes.lines:  # a log scale needs data
        axes.set_xscale("log")
    if outcomes[0].until_loss is not None:
        axes.axhline(outcomes[0].until_loss, color=INK, linewidth=1, linestyle=(0, (2, 2)))
    axes.set_ylabel("loss", color=INK)
    _style(axes, label)


def _where_the_time_went(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    for row, outcome in enumerate(outcomes):
        begin = 0.0
        for part, colour in zip(parts(outcome), PARTS.values(), strict=True):
            share = 100 * part / outcome.seconds
            axes.barh(row + 0.15, share, left=begin, height=0.4, color=colour, edgecolor="none")
            begin += share
        _name_row(axes, row, f"{outcome.label}, {duration(outcome.seconds)}")
    axes.set_xlim(0, 100)
    _style_rows(axes, len(outcomes), "% of the run's seconds")


def _levels(axes: Axes, outcomes: Sequence[Outcome]) -> None:
    rows = [
        (index, outcome.label, level, count)
        for index, outcome in enumerate(outcomes)
        for level, count in outcome.level_bytes.items() or [("nothing sent", 0)]
    ]
    for row, (index, plan, level, count) in enumerate(rows):
        axes.barh(row + 0.15, max(count, 1), height=0.4, color=_colour(index), edgecolor="none")
        _name_row(axes, row, f"{plan}, {level}: {human_bytes(count)}")
    most = max(1, *(count for *_, count in rows))
    axes.set_xscale("log")
    axes.set_xlim(max(1, most / 1e5), most * 1.5)
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    _style_rows(axes, len(rows), "bytes")


def _name_row(axes: Axes, row: int, text: str) -> None:
    """Write the name above its bar, where there is room for a long one."""
    text = text if len(text) < 52 else f"{text[:32]} … {text[-18:]}"
    axes.annotate(text, (0.0, row - 0.12), xycoords=("axes fraction", "data"), color=INK, va="bottom")


def _style_rows(axes: Axes, count: int, label: str) -> None:
    axes.set_ylim(max(count, 2) - 0.4, -0.6)
    axes.set_yticks([])
    _style(axes, label)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


def _style(axes: Axes, label: str) -> None:
    axes.set_xlabel(label, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(which="both", colors=INK)
    axes.grid(visible=True, color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
