"""docs/plan.md: its commands parse, its options and JSON keys exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

import laconic
from laconic.cli.main import COMMANDS as NAMES
from laconic.cli.main import make_app
from laconic.tools.launch.links import link
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import Forecast, Scenario
from laconic.tools.planner.shapes import from_count
from tests.docs import tables

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
COMMANDS = typer.main.get_command(make_app(*NAMES)).commands  # type: ignore[attr-defined]


def test_commands_parse():
    lines = [part for block in re.findall(r"```\n(.*?)```", PAGE, re.S) for part in re.split(r"\n| && ", block) if part]
    assert len(lines) >= 4
    for line in lines:
        laconic_, name, *arguments = shlex.split(line)
        assert laconic_ == "laconic"
        COMMANDS[name].make_context(name, arguments)


def test_options_exist():
    known = {option for parameter in COMMANDS["plan"].params for option in parameter.opts}
    named = set(re.findall(r"`(--[a-z-]+)", PAGE)) - {"--plan"}
    assert named and named <= known | {"--json"}


def test_keys_of_the_table_exist():
    forecast = Forecast([laconic.ddp()], Scenario(from_count(1000), 2, ComputedNetwork(link("1gbit", 2)), 0.1))
    row = forecast.as_json()["rows"][0]
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]
    keys = {key for cell in cells for key in re.findall(r"`([a-z_]+)`", cell)}
    assert len(keys) > 10 and keys <= set(row)


def test_the_page_for_choosing_shows_what_is_printed():
    page = tables.PAGE.read_text()
    assert page == tables.with_tables(page), "python -m tests.docs.tables writes it"


def test_pages_name_one_plan_for_two_machines():
    """The command to paste is on one page, which names the plan that it prints; the others lead there."""
    best = tables.machines_table().partition("Use ")[2].partition(":")[0]
    typed = re.findall(r'Type the plan of the first line: `laconic.attach\("([^"]+)"', tables.PAGE.read_text())
    assert [laconic.plan(text) for text in typed] == [laconic.plan(best)]
    for name in ("plan.md", "clusters.md"):
        assert "choosing.md#machines-with-several-gpus" in (tables.PAGE.parent / name).read_text()
    two_machines = (tables.PAGE.parent / "two_machines.md").read_text()
    set_there = re.findall(r'export LACONIC_PLAN="([^"]+)"', two_machines)
    assert [laconic.plan(text) for text in set_there] == [laconic.plan(best)], "the plan that its first command prints"
    for page in (tables.PAGE.parent.parent / "README.md", tables.PAGE):
        assert '`power_sgd(rank=32)` for large matrices, else `diloco(group="machine")`' in page.read_text()


def test_the_readmes_table_of_links():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    rows = re.findall(r"^\| ([\d.]+ [GM]bit/s) \| `([^`]+)`[^|]*\| ?([^|]*)\|$", readme, re.M)
    assert rows or "Which plan for which link" not in readme
    for rate, plan, claim in rows:
        forecast = tables.link_forecast(rate)
        best = forecast.ranked[0]
        assert best.plan == laconic.plan(plan)
        if claim:
            sooner = (best.sooner_than(forecast.ddp), best.sooner_than(forecast.alone))
            assert [float(x) for x in re.findall(r"[\d.]+(?= times)", claim)] == pytest.approx(sooner, rel=0.1)
