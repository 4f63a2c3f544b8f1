"""The page: one self-contained HTML file for any screen, light or dark, with the raw data in it."""

import base64
import datetime
import os
import platform
import shlex
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from laconic.atomic_write import write_atomically
from laconic.plans.methods import alone
from laconic.tools.compare.judging import (
    as_json,
    efficiency,
    has_levels,
    kept,
    no_better_than_alone,
    reference,
    slow_bytes,
)
from laconic.tools.compare.records import Outcome
from laconic.tools.compare.report.sentence import headline
from laconic.tools.distribution import pip_install
from laconic.tools.errors import UsageError
from laconic.tools.machine import usable_cores, versions
from laconic.tools.units import human_bytes, percent, ratio

TEMPLATE = Path(__file__).with_name("page.html")
DARK_PLANS = ("#b6bec8", "#5cb3ec", "#ff9657", "#3fcf9f", "#e59ccb", "#e3c34d")
DARK_PARTS = ("#84b78e", "#e3c34d", "#9b86cc")
SWATCHES = ("solid", "dashed", "dashed", "dotted")
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

    from laconic.tools.compare.report.figures import PARTS, PLANS, drawings, svg

    first, levels = reference(outcomes), has_levels(outcomes)
    target = "" if first.until_loss is None else f" to {first.loss_of} loss {first.until_loss:g}"
    sent = ("sent by each", *(["between groups"] if levels else []), "fewer")
    speed = () if first.until_loss is None else ("efficiency",)
    computed = " (computed)" if first.clock == "computed" else ""
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
                (f"{first.loss_of} loss", "kept", f"seconds{target}{computed}", *speed, "sooner", *sent),
                [(*_name(outcome, outcomes), _cells(first, outcome, outcomes)) for outcome in outcomes],
            ),
            ("details", DETAILS, [(outcome.label, "", _details(outcome)) for outcome in outcomes]),
        ],
        uplinks=[(f"{o.plan}", name, human_bytes(count)) for o in outcomes for name, count in o.uplink_bytes.items()],
        command=shlex.join(["laconic", *arguments]),
        facts={**versions(), **machine()},
        data=base64.b64encode(as_json(outcomes).encode()).decode(),
        light=_variables(PLANS, PARTS.values()),
        dark=_variables(DARK_PLANS, DARK_PARTS),
    )


def _variables(plans: Iterable[str], parts: Iterable[str]) -> str:
    """The colours as CSS."""
    named = {f"plan-{index}": colour for index, colour in enumerate(plans)}
    named |= {f"part-{index}": colour for index, colour in enumerate(parts)}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


def _name(outcome: Outcome, outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """The name of a run, and a note about it."""
    return outcome.label, "no better than alone()" if no_better_than_alone(outcome, outcomes) else ""


def _cells(first: Outcome, outcome: Outcome, outcomes: Sequence[Outcome]) -> list[str]:
    """The cells of a run, as in the table's columns. Ratios are to `first`."""
    speed = efficiency(outcome, outcomes)
    compared = first.ended == outcome.ended and first.ended != "seconds"
    return [
        f"{outcome.loss_start:.3f} → {outcome.loss_final:.3f}",
        percent(kept(outcome, outcomes)),
        f"{outcome.seconds:,.1f}" + ("" if first.until_loss is None or outcome.reached else " (not reached)"),
        *([] if first.until_loss is None else ["-" if speed is None else f"{speed:.2f}"]),
        ratio(first.seconds, outcome.seconds).replace("x", "×") if compared else "-",
        human_bytes(outcome.wire_bytes),
        *([human_bytes(slow_bytes(outcome))] if has_levels(outcomes) else []),
        "-" if outcome.plan == alone() else ratio(slow_bytes(first), slow_bytes(outcome)).replace("x", "×"),
    ]


def _details(outcome: Outcome) -> list[str]:
    """The cells of a run, as in DETAILS."""
    from laconic.tools.compare.report.figures import parts

    computing, communicating, waiting = (f"{part:,.1f}" for part in parts(outcome))
    return [
        computing,
        communicating,
        "-" if outcome.waiting_seconds is None else waiting,
        human_bytes(outcome.network_bytes),
        "-" if outcome.interface_bytes is None else human_bytes(outcome.interface_bytes),
    ]


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
