"""`laconic plan`: a prediction without training."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

import laconic
from laconic.cli.forecast import forecast_tables
from laconic.tools.launch.links import link as parse_link
from laconic.tools.planner.collectives import Formula
from laconic.tools.planner.front import PLANS
from laconic.tools.planner.predict import Scenario
from laconic.tools.planner.rows import Forecast
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
    assert "needs_bps" not in ddp


def test_needs_layers_and_bits(here):
    options = ["--layers", "24", "--payload-bits", "13.33", "--workers", "2", "--link", "1gbit", "--step", "0.1s"]
    found = json.loads(here("plan", "--parameters", "1B", *options, "--plan", "ddp()", "--need", "50,99", "--json").out)
    (row,) = found["rows"]
    assert row["needs_bps"] == {"50": pytest.approx(81.3e9, rel=0.01), "99": pytest.approx(549.9e9, rel=0.01)}
    assert row["sent_bytes_per_step"] == pytest.approx(13.33e9 / 8, rel=1e-3)


def test_table_explanation_and_picture(here, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    picture = tmp_path / "plans.svg"
    options = ["--explain", "--picture", str(picture), "--mtbf", "12h", "--price", "0.05", "--budget", "1TB"]
    out = here(*BASE, *options, "--need", "80").out
    for part in (
        "power_sgd(rank=32, bits=4)",
        "break-even",
        "needs for 80 %",
        "within budget",
        "goodput: exp(",
        "Use ",
    ):
        assert part in out
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (135, 1)])
def test_a_narrow_terminal_shows_every_plan(width, tables):
    scenario = Scenario(from_count(2_000_000), 8, Formula(parse_link("1gbit")), 0.25)
    found = forecast_tables(Forecast([laconic.plan(text) for text in PLANS], scenario), width)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*found)
    text = console.export_text()
    assert len(found) == tables and "…" not in text
    for plan in PLANS:
        assert text.count(plan.split("(")[0]) >= tables


def test_what_a_probe_has_not_measured_is_said(here, tmp_path):
    path = tmp_path / "probe.json"
    PROBE.write(path)
    asked = ["plan", "--probe", str(path), "--workers", "4", "--link", "1gbit"]
    asked += ["--plan", "ddp()", "--plan", "power_sgd(rank=8)"]
    assert "The codec of power_sgd(rank=8, bits=4) is not in the probe" in here(*asked).out
    replace(PROBE, step=None).write(path)
    assert "the probe has no time of a step" in here(*asked).err


def test_a_finished_run_is_checked(here, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    run = {"plan": "ddp()", "steps": 10, "seconds": 15.0, "wire_bytes": 1_850_803_200, "talking_seconds": 14.0}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps([run | {"parameters": 30_846_720, "workers": 4}]))
    out = here(*BASE, "--check", str(file)).out
    assert "sent by each, bytes" in out and "+0.0%" in out
    file.write_text(json.dumps([run | {"parameters": 7, "workers": 4}]))
    assert "Predict the same training." in here(*BASE, "--check", str(file)).err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan"], "a model is missing"),
        ([*MODEL], "a network is missing"),
        ([*MODEL, "--link", "1gbit"], "tell how many workers there are"),
        ([*MODEL, "--link", "1gbit", "--workers", "4"], "the time of a step without communication is missing"),
        ([*BASE, "--step", "soon"], "--step soon: write a duration"),
        ([*BASE, "--latency", "0ms"], "--latency 0ms: write a duration of more than 0"),
        ([*BASE, "--need", "80,100"], "--need 80,100: write percentages"),
        ([*BASE, "--budget", "much"], "--budget much: write an amount"),
        ([*BASE, "--algorithm", "star"], "--algorithm star: it is one of ring, "),
        ([*BASE, "--jitter", "-1"], "--jitter -1.0: it must not be negative"),
        ([*BASE, "--gain", "0.5"], "--gain 0.5"),
        ([*BASE, "--payload-bits", "0"], "--payload-bits 0.0: it must be above 0"),
        ([*BASE, "--layers", "0"], "--layers 0"),
        ([*BASE, "--model", "a:b"], "--model and --parameters: one model is enough"),
        ([*BASE, "--plan", "gossip()"], "gossip"),
        ([*BASE, "--plan", "post_local_sgd(group='machine')"], "how many workers a machine has"),
        ([*BASE, "--plan", "streaming_diloco(period=90, fragments=80)"], "80"),
        ([*BASE, "--probe", "no/such.json"], "--probe no/such.json"),
        ([*BASE, "--check", "no/such.json"], "--check no/such.json"),
        ([*BASE, "--topology", "2 @ 1gbit, 3 @ 1gbit"], "2 x 3 = 6 workers, and 4 were asked for"),
    ],
)
def test_mistakes(here, arguments, words):
    ended = here(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert words in " ".join(ended.err.split())
