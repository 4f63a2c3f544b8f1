"""`laconic plan`: a prediction without training."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from laconic.cli.forecast import forecast_tables
from laconic.tools.launch.links import link as parse_link
from laconic.tools.planner.forecast import Forecast
from laconic.tools.planner.front import PLANS
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import Scenario
from laconic.tools.planner.shapes import from_count
from tests.tools.planner.test_probe_data import PROBE

MODEL = ["plan", "--parameters", "30846720"]
BASE = [*MODEL, "--workers", "4", "--link", "992.6mbit", "--step", "25.2ms"]
TWO = [*BASE, "--plan", "diloco(period=8)", "--plan", "ddp()"]


def test_json(here):
    found = json.loads(here(*TWO, "--json").out)
    local, ddp = found["rows"]
    assert (local["plan"], ddp["plan"]) == ("diloco(period=8)", "ddp()")
    assert ddp["sent_bytes_per_step"] == 1.5 * 4 * 30_846_720
    assert ddp["step_s"] == pytest.approx(0.0252 + 1.4752, rel=0.01)
    assert ddp["utilisation"] == pytest.approx(0.0252 / ddp["step_s"])
    assert local["speedup_over_ddp"] == pytest.approx(ddp["step_s"] / local["step_s"])
    assert "was not measured" in found["advice"]
    assert "within_budget" not in ddp


def test_layers_and_needs(here):
    options = ["--layers", "24", "--workers", "2", "--link", "1gbit", "--step", "0.1s"]
    found = json.loads(here("plan", "--parameters", "1B", *options, "--plan", "ddp()", "--json").out)
    (row,) = found["rows"]
    assert row["needs_bps"]["50%"] == pytest.approx(81.3e9 * 32 / 13.33, rel=0.01)
    assert row["sent_bytes_per_step"] == 4 * 10**9


def test_table_and_budget(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = here(*BASE, "--budget", "5TB").out
    for part in ("power_sgd(rank=32, bits=4)", "break-even", "budget", "yes", "no", "Use "):
        assert part in out


def test_noise(here):
    found = here(*BASE, "--noise", "9").out
    assert "4 workers are worth 3.1 here: a noise of 9 batches of one worker." in found
    assert "Train by alone()" not in found
    assert "Train by alone(): under a noise of 0.1," in here(*BASE, "--noise", "0.1").out
    for wrong in ("-1", "nan"):
        ended = here(*BASE, "--noise", wrong)
        assert ended.code == 2 and "it must be 0 or more, such as 3.5" in ended.err


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (135, 1)])
def test_a_narrow_terminal_shows_every_plan(width, tables):
    scenario = Scenario(from_count(2_000_000), 8, ComputedNetwork(parse_link("1gbit")), 0.25)
    found = forecast_tables(Forecast(PLANS, scenario), width)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*found)
    text = console.export_text()
    assert len(found) == tables and "…" not in text
    for plan in PLANS:
        assert text.count(repr(plan).split("(")[0]) >= tables


def test_what_a_probe_has_not_measured_is_said(here, tmp_path):
    path = tmp_path / "probe.json"
    PROBE.write(path)
    asked = ["plan", "--probe", str(path), "--workers", "4", "--link", "1gbit"]
    asked += ["--plan", "ddp()", "--plan", "power_sgd(rank=8)"]
    assert "The codec of power_sgd(rank=8, bits=4) is not in the probe" in here(*asked).out
    replace(PROBE, step=None).write(path)
    assert "the probe has no time of a step" in here(*asked).err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "a model is missing"),
        ([*MODEL], "a network is missing"),
        ([*MODEL, "--link", "1gbit"], "the number of workers is missing"),
        ([*MODEL, "--link", "1gbit", "--workers", "4"], "the time of a step without communication is missing"),
        ([*BASE, "--step", "soon"], "--step soon: write a duration"),
        ([*BASE, "--latency", "0ms"], "--latency 0ms: write a duration of more than 0"),
        ([*BASE, "--budget", "much"], "--budget much: write an amount"),
        ([*BASE, "--layers", "0"], "--layers 0"),
        ([*BASE, "--layers", "400000000"], "--layers 400000000: it divides --parameters, and must be from 1 to 10000"),
        ([*MODEL, "--workers", "0", "--link", "1gbit", "--step", "1s"], "--workers 0: there must be at least 1"),
        ([*BASE, "--plan", "post_local_sgd(period=4, group=3)"], "asks for groups of 3, and 4 workers cannot be"),
        ([*BASE, "--plan", "auto"], "--plan auto: it measures a training and then chooses"),
        ([*BASE, "--model", "a:b"], "--model and --parameters: one model is enough"),
        ([*BASE, "--plan", "gossip()"], "gossip"),
        ([*BASE, "--plan", "post_local_sgd(group='machine')"], "how many workers a machine has"),
        ([*BASE, "--probe", "no/such.json"], "--probe no/such.json"),
        ([*BASE, "--link", "2 @ 1gbit, 3 @ 1gbit"], "2 x 3 = 6 workers, and 4 were asked for"),
    ],
)
def test_mistakes(here, arguments, words):
    ended = here(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert words in " ".join(ended.err.split())


def test_one_parameter_is_a_model(here):
    ended = here("plan", "--parameters", "1", "--link", "1gbit", "--workers", "4", "--step", "250ms")
    assert ended.code == 0 and "Do not compress" in ended.out
