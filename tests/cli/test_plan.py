"""`laconic plan`: a prediction without training."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import get_args

import pytest
import torch
from rich.console import Console

import laconic
from laconic.cli import plan
from laconic.cli.forecast import forecast_tables
from laconic.cli.plan import Optimizer
from laconic.plans.targets import Kind
from laconic.plans.text import _VOCABULARY
from laconic.tools.launch.links import link as parse_link
from laconic.tools.planner import quality
from laconic.tools.planner.network import ComputedNetwork
from laconic.tools.planner.predict import PLANS, Forecast, Scenario
from laconic.tools.planner.probe_data import OPS, Timing
from laconic.tools.planner.shapes import from_count
from tests.tools.planner.test_probe_data import PROBE

MODEL = ["plan", "--parameters", "30846720"]
BASE = [*MODEL, "--workers", "4", "--link", "992.6mbit", "--step", "25.2ms"]
TWO = [*BASE, "--plan", "diloco(period=8, momentum=0.9)", "--plan", "ddp()"]


def test_json(here):
    found = json.loads(here(*TWO, "--json").out)
    local, ddp = found["rows"]
    assert (local["plan"], ddp["plan"]) == ("diloco(period=8, momentum=0.9)", "ddp()")
    assert ddp["sent_bytes_per_step"] == 1.5 * 4 * 30_846_720
    assert ddp["step_s"] == pytest.approx(0.0252 + 1.4752, rel=0.01)
    assert ddp["utilisation"] == pytest.approx(0.0252 / ddp["step_s"])
    assert local["speedup_over_ddp"] == pytest.approx(ddp["step_s"] / local["step_s"])
    assert "was not measured" in found["advice"]


def test_layers_and_needs():
    scenario = Scenario(from_count(10**9, layers=24), 2, ComputedNetwork(parse_link("1gbit", 2)), 0.1)
    (row,) = Forecast([laconic.ddp()], scenario).as_json()["rows"]
    assert row["needs_bps"]["50%"] == pytest.approx(81.3e9 * 32 / 13.33, rel=0.01)
    assert row["sent_bytes_per_step"] == 4 * 10**9


def test_the_table(here):
    out = here(*BASE).out
    assert "power_sgd(rank=32, bits=4)" in out
    assert out.startswith("Use ") and "break-even" not in out  # the advice is first, and details need --all
    assert "frugal(bytes='60x') is" not in out
    whole = here(*BASE, "--all").out
    assert "break-even" in whole and "frugal(bytes='60x') is power_sgd(" in whole
    assert {row["resolved"] for row in json.loads(here(*BASE, "--json").out)["rows"]} > {"ddp()", "diloco(period=16)"}


def test_one_thread_is_enough(here):
    """With more, torch's threads wait for each other in equations of five unknowns: 0.5 s of CPU."""
    torch.set_num_threads(2)
    assert here(*TWO).code == 0
    assert torch.get_num_threads() == 1


def test_noise(here):
    found = here(*BASE, "--noise", "9").out
    assert "4 workers are worth 3.1 here: a noise of 9 batches of one worker." in found
    assert "Train by alone()" not in found
    assert "Train by alone(): under a noise of 0.1," in here(*BASE, "--noise", "0.1").out
    for wrong in ("-1", "nan"):
        ended = here(*BASE, "--noise", wrong)
        assert ended.code == 2 and "it must be 0 or more, such as 3.5" in ended.err


@pytest.mark.parametrize(("width", "all_columns", "tables"), [(70, False, 1), (80, True, 3), (165, True, 1)])
def test_a_narrow_terminal_shows_every_plan(width, all_columns, tables):
    scenario = Scenario(from_count(2_000_000), 8, ComputedNetwork(parse_link("1gbit")), 0.25)
    found = forecast_tables(Forecast(PLANS, scenario), width, all_columns=all_columns)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(*found)
    text = console.export_text()
    assert len(found) == tables and "…" not in text
    for each in PLANS:
        assert text.count(repr(each).split("(")[0]) >= tables


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
        ([*BASE, "--trainable", "40M"], "--trainable 40000000: it must be from 1 to the 30846720 of --parameters"),
        ([*BASE, "--trainable", "0"], "--trainable 0: write"),
        ([*BASE[:1], *BASE[3:], "--trainable", "4M"], "--trainable 4M: it says how many of --parameters are trained"),
        ([*MODEL, "--workers", "0", "--link", "1gbit", "--step", "1s"], "--workers 0: there must be at least 1"),
        ([*BASE, "--plan", "post_local_sgd(period=4, group=3)"], "asks for groups of 3, and 4 workers cannot be"),
        ([*BASE, "--model", "a:b"], "--model and --parameters: one model is enough"),
        ([*BASE, "--plan", "gossip()"], "gossip"),
        ([*BASE, "--plan", "post_local_sgd(group='machine')"], 'as in --link "4 @ 100GB/s, 2 @ 1gbit".'),
        ([*BASE, "--plan", "power_sgd(group=2)"], "Use frugal(group=2) or diloco(group=2), which send weights between"),
        ([*BASE, "--probe", "no/such.json"], "--probe no/such.json"),
        ([*BASE, "--link", "2 @ 1gbit, 3 @ 1gbit"], "2 x 3 = 6 workers, and 4 were asked for"),
    ],
)
def test_mistakes(here, arguments, words):
    ended = here(*arguments)
    assert (ended.code, ended.out) == (2, "")
    assert words in " ".join(ended.err.split())


@pytest.mark.parametrize("text", ["auto", "auto()", "laconic.auto(steps=20000)"])
def test_auto_is_refused_by_name(here, text, monkeypatch):
    monkeypatch.delitem(_VOCABULARY, "auto", raising=False)  # as in the command, which does not import auto()
    ended = here(*BASE, "--plan", text)
    assert ended.code == 2 and "--plan auto: it measures a training and then chooses" in " ".join(ended.err.split())


def test_adapters_that_need_no_compression(here):
    options = ["--workers", "4", "--link", "1gbit", "--step", "4s"]
    ended = here("plan", "--parameters", "8B", "--trainable", "40M", *options)
    assert ended.code == 0 and "Do not compress" in ended.out and "40,000,000 parameters" in ended.out
    options[-3:] = ["100mbit", "--step", "4s"]
    found = json.loads(here("plan", "--parameters", "8B", "--trainable", "40M", *options, "--json").out)
    kept = {row["plan"]: row["kept"] for row in found["rows"]}
    # What is predicted of a target is predicted of what it becomes here: fewer bytes keep less.
    assert kept["quantized_ddp(bits=4)"] > kept["frugal(bytes='30x')"] > kept["frugal(bytes='60x')"]


def test_one_parameter_is_a_model(here):
    ended = here("plan", "--parameters", "1", "--link", "1gbit", "--workers", "4", "--step", "250ms")
    assert ended.code == 0 and "Do not compress" in ended.out


LEVELS = ["plan", "--parameters", "350M", "--workers", "8", "--link", "4 @ 100GB/s, 2 @ 1Gb/s", "--step", "250ms"]


def test_links_of_two_levels(here):
    found = json.loads(here(*LEVELS, "--json").out)
    rows = {row["plan"]: row for row in found["rows"]}
    assert found["workers_sharing_a_link"] == 4
    grouped = rows["diloco(period=16, group='machine')"]
    # Gradients stay inside the machine: only deltas go over the link that four workers share.
    assert grouped["sent_bytes_by_level"].keys() == {"groups of 4", "world"}
    inside, between = grouped["sent_bytes_by_level"].values()
    assert (inside if inside > between else between) == 1.5 * 4 * 350_000_000
    assert grouped["link_bytes_per_step"] < grouped["sent_bytes_per_step"] / 50
    flat = rows["diloco(period=16)"]
    assert grouped["link_bytes_per_step"] == flat["link_bytes_per_step"]
    assert grouped["kept"] == flat["kept"] and grouped["steps_factor"] < flat["steps_factor"]
    assert rows["ddp()"]["link_bytes_per_step"] == rows["ddp()"]["sent_bytes_per_step"]  # a ring leaves a machine once
    for times in (30, 60, 120):
        row = rows[f"frugal(bytes='{times}x', group='machine')"]
        headers = 1000  # which the target leaves out
        assert row["link_bytes_per_step"] <= rows["ddp()"]["link_bytes_per_step"] / times + headers
        assert "group='machine'" in row["resolved"]
    out = here(*LEVELS).out
    assert "what 4 workers send together over the slowest link" in out
    assert "counts as one worker with so many times the batch" in out


def test_groups_of_a_probe(here, tmp_path):
    """Groups that a probe has measured, such as sites, are compared, and their workers share the link."""
    levels = (("groups of 2", 2, 1e-4), ("world", 4, 1e-2))
    timings = [Timing(op, level, size, 1024, (s,)) for op in OPS for level, size, s in levels]
    path = tmp_path / "probe.json"
    replace(PROBE, timings=tuple(timings)).write(path)
    found = json.loads(here("plan", "--probe", str(path), "--json").out)
    assert found["workers_sharing_a_link"] == 2
    assert {"diloco(period=16, group=2)", "frugal(bytes='30x', group=2)"} < {row["plan"] for row in found["rows"]}


def test_groups_that_act_as_one_worker(here):
    noisy = [*LEVELS, "--plan", "diloco(period=16, group='machine')", "--plan", "diloco(period=16, group=8)"]
    rows = json.loads(here(*noisy, "--noise", "16", "--json").out)["rows"]
    alone = ["plan", "--parameters", "350M", "--workers", "2", "--link", "1Gb/s", "--step", "250ms", "--noise", "4"]
    (two,) = json.loads(here(*alone, "--plan", "diloco(period=16)", "--json").out)["rows"]
    assert rows[0]["kept"] == two["kept"] and rows[0]["steps_factor"] == two["steps_factor"]
    assert (rows[1]["kept"], rows[1]["steps_factor"]) == (1, 1)  # all average gradients at every step


def test_the_options_are_those_of_the_planner():
    assert get_args(Optimizer) == get_args(Kind)
    assert plan.STEPS == quality.STEPS
