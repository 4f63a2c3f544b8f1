"""The four figures: loss against time, loss against bytes, parts of the time, bytes of each level.

Matplotlib draws them, in a size that is readable on a phone. In the page, colours are variables of its style sheet, for
light and dark: the figures are drawn in placeholder colours, which are then replaced.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from laconic.compare.records import Outcome
from laconic.compare.units import duration, human_bytes

PART_NAMES = ("computing", "communicating", "waiting")
INCHES = (4.4, 3.0)
LINE_STYLES: tuple[Literal["-", "--", "-.", ":"], ...] = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Colours:
    """The colours of a drawing."""

    ink: str
    faint: str
    plans: tuple[str, ...]
    parts: tuple[str, str, str]

    def plan(self, index: int) -> str:
        """The colour of a plan."""
        return self.plans[index % len(self.plans)]


PRINTED = Colours(
    ink="#1b1f24",
    faint="#d5d9de",
    plans=("#4c5560", "#0072b2", "#d55e00", "#00835f", "#a64d86", "#8a6d00"),
    parts=("#6f9a78", "#cfa52a", "#b7a3dd"),
)
PLACEHOLDER = Colours(
    ink="#010101",
    faint="#020202",
    plans=tuple(f"#0303{index:02x}" for index in range(1, 7)),
    parts=("#040401", "#040402", "#040403"),
)
VARIABLES = {
    PLACEHOLDER.ink: "var(--ink)",
    PLACEHOLDER.faint: "var(--faint)",
    **{colour: f"var(--plan-{index})" for index, colour in enumerate(PLACEHOLDER.plans)},
    **{colour: f"var(--part-{index})" for index, colour in enumerate(PLACEHOLDER.parts)},
}


@dataclass(frozen=True)
class Drawing:
    """A figure: its id in the page, its title, its caption, and the function that draws it."""

    name: str
    title: str
    note: str
    draw: Callable[[Axes, Sequence[Outcome], Colours], None]


def drawings(outcomes: Sequence[Outcome]) -> list[Drawing]:
    """The figures of a comparison."""
    clock = "" if outcomes[0].clock == "measured" else " The time of the link is computed from the bytes."
    smooth = "Training loss, averaged over 8 steps and all workers."
    time_note = "Computing alone, communicating (a collective is in flight), and waiting for slower workers."
    return [
        Drawing("loss-time", "Loss against time", smooth + clock, _loss_against_time),
        Drawing("loss-bytes", "Loss against bytes", f"{smooth} Bytes that one worker sends.", _loss_against_bytes),
        Drawing("time", "Where the time went", time_note + clock, _where_the_time_went),
        Drawing("levels", "Bytes of each level", "Bytes that one worker sends at each level of the plan.", _levels),
    ]


def svg(drawing: Drawing, outcomes: Sequence[Outcome]) -> str:
    """Draw a figure as SVG for the page: colours are variables, text stays text, ids are unique."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "laconic", "font.size": 10}):
        figure = Figure(figsize=INCHES, layout="constrained")
        drawing.draw(figure.add_subplot(), outcomes, PLACEHOLDER)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    source = text.getvalue()
    source = source[source.index("<svg ") :].rstrip()
    source = re.sub(r"<metadata>.*?</metadata>", "", source, flags=re.DOTALL)
    source = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{drawing.name}-", source)
    source = re.sub(r"(\d)px ('DejaVu Sans'[^;\"]*)", r"\1px system-ui, sans-serif", source)
    accessible = f'role="img" aria-label="{drawing.title}"'
    source = re.sub(r'^<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf"<svg \1 {accessible}>", source)
    for placeholder, variable in VARIABLES.items():
        source = source.replace(placeholder, variable)
    return source


def png(outcomes: Sequence[Outcome], title: str) -> bytes:
    """Draw all figures in one image, on white."""
    with matplotlib.rc_context({"font.size": 9}):
        figure = Figure(figsize=(2.3 * INCHES[0], 2.2 * INCHES[1] + 0.9), layout="constrained")
        for axes, drawing in zip(figure.subplots(2, 2).flat, drawings(outcomes), strict=True):
            axes.set_title(drawing.title, loc="left", fontweight="bold", color=PRINTED.ink)
            drawing.draw(axes, outcomes, PRINTED)
        patches = [Patch(color=colour, label=name) for colour, name in zip(PRINTED.parts, PART_NAMES, strict=True)]
        figure.axes[2].legend(handles=patches, loc="upper right", ncols=3, frameon=False, fontsize=8)
        lines = [
            Line2D([], [], color=PRINTED.plan(index), linestyle=LINE_STYLES[index % 4], linewidth=2)
            for index in range(len(outcomes))
        ]
        figure.legend(lines, [outcome.plan for outcome in outcomes], loc="outside lower center", ncols=3, frameon=False)
        figure.suptitle(title, wrap=True, color=PRINTED.ink, fontsize=11)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=130, metadata={"Software": None})
    return content.getvalue()


def parts(outcome: Outcome) -> tuple[float, float, float]:
    """The seconds of computing alone, communicating and waiting; their sum is the run's."""
    waiting = outcome.waiting_seconds or 0.0
    return outcome.seconds - outcome.talking_seconds, outcome.talking_seconds - waiting, waiting


def _loss_against_time(axes: Axes, outcomes: Sequence[Outcome], colours: Colours) -> None:
    label = "seconds (link computed)" if outcomes[0].clock == "computed" else "seconds"
    _losses(axes, outcomes, colours, [[point.seconds for point in outcome.curve] for outcome in outcomes], label)
    axes.xaxis.set_major_formatter("{x:g}")


def _loss_against_bytes(axes: Axes, outcomes: Sequence[Outcome], colours: Colours) -> None:
    sent = [[float(point.wire_bytes) for point in outcome.curve] for outcome in outcomes]
    _losses(axes, outcomes, colours, sent, "bytes sent by each worker")
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))


def _losses(
    axes: Axes, outcomes: Sequence[Outcome], colours: Colours, xs: Sequence[Sequence[float]], label: str
) -> None:
    for index, (outcome, x) in enumerate(zip(outcomes, xs, strict=True)):
        pairs = zip(x, (point.loss for point in outcome.curve), strict=True)
        shown = [(value, loss) for value, loss in pairs if value > 0 and math.isfinite(loss)]
        if shown:
            colour, style = colours.plan(index), LINE_STYLES[index % 4]
            axes.plot(*zip(*shown, strict=True), linestyle=style, linewidth=2, color=colour)
            axes.plot(*shown[-1], marker="o", markersize=5, linestyle="none", color=colour)
    if axes.lines:  # a log scale needs data
        axes.set_xscale("log")
    if outcomes[0].until_loss is not None:
        axes.axhline(outcomes[0].until_loss, color=colours.ink, linewidth=1, linestyle=(0, (2, 2)))
    axes.set_ylabel("loss", color=colours.ink)
    _style(axes, colours, label)


def _where_the_time_went(axes: Axes, outcomes: Sequence[Outcome], colours: Colours) -> None:
    for row, outcome in enumerate(outcomes):
        begin = 0.0
        for part, colour in zip(parts(outcome), colours.parts, strict=True):
            share = 100 * part / outcome.seconds
            axes.barh(row + 0.15, share, left=begin, height=0.4, color=colour, edgecolor="none")
            begin += share
        _name_row(axes, row, f"{outcome.plan}, {duration(outcome.seconds)}", colours)
    axes.set_xlim(0, 100)
    _style_rows(axes, len(outcomes), colours, "% of the run's seconds")


def _levels(axes: Axes, outcomes: Sequence[Outcome], colours: Colours) -> None:
    rows = [
        (index, outcome.plan, level, count)
        for index, outcome in enumerate(outcomes)
        for level, count in outcome.level_bytes.items() or [("nothing sent", 0)]
    ]
    for row, (index, plan, level, count) in enumerate(rows):
        axes.barh(row + 0.15, max(count, 1), height=0.4, color=colours.plan(index), edgecolor="none")
        _name_row(axes, row, f"{plan}, {level}: {human_bytes(count)}", colours)
    most = max(1, *(count for *_, count in rows))
    axes.set_xscale("log")
    axes.set_xlim(max(1, most / 1e5), most * 1.5)
    axes.xaxis.set_major_formatter(lambda value, _: human_bytes(value))
    _style_rows(axes, len(rows), colours, "bytes")


def _name_row(axes: Axes, row: int, text: str, colours: Colours) -> None:
    """Write the name above its bar, where there is room for a long one."""
    text = text if len(text) < 52 else f"{text[:32]} … {text[-18:]}"
    axes.annotate(text, (0.0, row - 0.12), xycoords=("axes fraction", "data"), color=colours.ink, va="bottom")


def _style_rows(axes: Axes, count: int, colours: Colours, label: str) -> None:
    axes.set_ylim(max(count, 2) - 0.4, -0.6)
    axes.set_yticks([])
    _style(axes, colours, label)
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)


def _style(axes: Axes, colours: Colours, label: str) -> None:
    axes.set_xlabel(label, color=colours.ink)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(colours.ink)
    axes.tick_params(which="both", colors=colours.ink)
    axes.grid(visible=True, color=colours.faint, linewidth=0.6)
    axes.set_axisbelow(True)
