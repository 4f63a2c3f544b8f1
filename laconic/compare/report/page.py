"""The page: one self-contained HTML file for any screen, light or dark, with the raw data in it."""

import base64
import datetime
import os
import platform
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from laconic.compare.files import versions, write_whole
from laconic.compare.records import Outcome, as_json
from laconic.compare.report.figures import PRINTED, drawings, parts, png, svg
from laconic.compare.report.sentence import headline
from laconic.compare.settings import LabError, usable_cores
from laconic.compare.units import human_bytes, times_fewer

TEMPLATE = Path(__file__).with_name("page.html")
DARK_PLANS = ("#b6bec8", "#5cb3ec", "#ff9657", "#3fcf9f", "#e59ccb", "#e3c34d")
DARK_PARTS = ("#84b78e", "#e3c34d", "#9b86cc")
SWATCHES = ("solid", "dashed", "dashed", "dotted")


@dataclass(frozen=True)
class Line:
    """A row of the table, formatted."""

    plan: str
    loss: str
    seconds: str
    sooner: str
    parts: tuple[str, str, str]
    sent: str
    fewer: str
    network: str
    interface: str


def check_drawable(written: str) -> None:
    """Refuse a report before any training if its dependencies are not installed."""
    missing = [name for name in ("matplotlib", "jinja2") if find_spec(name) is None]
    if missing:
        raise LabError(
            f"{written}: its figures need {' and '.join(missing)}, which cannot be imported. "
            'Install with pip install "laconic[report]", or leave out the option.'
        )


def write_page(path: Path, outcomes: Sequence[Outcome], arguments: Sequence[str]) -> None:
    """Write the report; `arguments` are those of the command."""
    write_whole(path, page(outcomes, arguments).encode())


def write_png(path: Path, outcomes: Sequence[Outcome]) -> None:
    """Write the figures as one image."""
    write_whole(path, png(outcomes, headline(outcomes)))


def page(outcomes: Sequence[Outcome], arguments: Sequence[str]) -> str:
    """The report as HTML."""
    from jinja2 import Environment, StrictUndefined

    first = outcomes[0]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(TEMPLATE.read_text()).render(
        headline=headline(outcomes),
        first=first,
        size=f"{first.parameters:,}",
        plans=[(outcome.plan, SWATCHES[index % 4], index % 6) for index, outcome in enumerate(outcomes)],
        figures=[(drawing, svg(drawing, outcomes)) for drawing in drawings(outcomes)],
        lines=[_line(first, outcome) for outcome in outcomes],
        uplinks=[(o.plan, name, human_bytes(count)) for o in outcomes for name, count in o.uplink_bytes.items()],
        command=shlex.join(["laconic", *arguments]),
        facts={**versions(), **machine()},
        data=base64.b64encode(as_json(outcomes).encode()).decode(),
        light=list(enumerate(PRINTED.plans)),
        dark=list(enumerate(DARK_PLANS)),
        light_parts=list(enumerate(PRINTED.parts)),
        dark_parts=list(enumerate(DARK_PARTS)),
    )


def machine() -> dict[str, str]:
    """The machine, without its name."""
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "processor": f"{_processor()}, {usable_cores()} usable cores",
        **_memory(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _memory() -> dict[str, str]:
    if not hasattr(os, "sysconf"):
        return {}
    return {"memory": human_bytes(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _line(first: Outcome, outcome: Outcome) -> Line:
    computing, communicating, waiting = (f"{part:,.1f}" for part in parts(outcome))
    if outcome.waiting_seconds is None:
        waiting = "-"
    compared = first.ended == outcome.ended and first.ended != "seconds"
    return Line(
        plan=outcome.plan,
        loss=f"{outcome.loss_start:.3f} → {outcome.loss_final:.3f}",
        seconds=f"{outcome.seconds:,.1f}" + ("" if first.until_loss is None or outcome.reached else " (not reached)"),
        sooner=f"{first.seconds / outcome.seconds:.1f}×" if compared else "-",
        parts=(computing, communicating, waiting),
        sent=human_bytes(outcome.sent_bytes),
        fewer=times_fewer(first.sent_bytes, outcome.sent_bytes).replace("x", "×"),
        network=human_bytes(outcome.network_bytes),
        interface="-" if outcome.interface_bytes is None else human_bytes(outcome.interface_bytes),
    )
