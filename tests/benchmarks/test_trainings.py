"""The suite of trainings: its record, and what the documentation says of it."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from laconic.tools.planner import quality

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("trainings_tables")


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("trainings")


def test_the_page_has_the_tables_of_the_record(tables):
    page, readme = tables.PAGE.read_text(), tables.README.read_text()
    for name, make in tables.TABLES.items():
        assert tables.on_page(page, name) == make(), f"{name}: run python benchmarks/trainings_tables.py"
    assert tables.on_page(readme, "kept") == tables.short(), "run python benchmarks/trainings_tables.py"
    assert tables.short().count("%") == len(tables.SHORT) * len(tables.COLUMNS), "every cell was measured"


BEHIND = {("muon", "120x")}
"""Where a named plan of as many or fewer bytes kept more than 5 points more than `frugal`."""
NOT_MEASURED: set[tuple[str, str]] = set()


def test_no_named_plan_keeps_more_than_frugal_at_as_many_bytes(tables):
    found = {(each.training, each.factor): each.behind for each in tables.choices()}
    assert {place for place, behind in found.items() if behind is None} == NOT_MEASURED
    assert {place for place, behind in found.items() if behind is not None and behind > tables.NEAR} == BEHIND


def test_a_training_that_is_left_out_is_inside_nine_of_ten_intervals(tables):
    cells = list(tables.left_out())
    inside = [each.predicted.low <= each.kept <= each.predicted.high for each in cells]
    assert len(cells) > 100
    assert sum(inside) / len(inside) >= 0.88


def _line(plan: str, loss: float, **more: object) -> dict[str, object]:
    """What `trainings.py` writes of a run of the convolutional net."""
    given = {"training": "cnn", "plan": plan, "seed": 1, "lr": 1.0, "steps": None, "became": plan, "noise": None}
    return {**given, "loss": loss, "bytes": 10, "ddp_bytes": 600, **more}


def test_recording_keeps_what_was_recorded(suite, tmp_path):
    ends = [_line("ddp()", 1.0), _line("alone()", 2.0)]
    path = tmp_path / "quality.json"
    suite.record([*ends, _line("frugal('60x')", 1.5, became="power_sgd(rank=4, bits=4)")], path)
    suite.record(
        [_line(*each, seed=0) for each in (("ddp()", 1.0), ("alone()", 2.0), ("power_sgd(rank=4)", 1.1))], path
    )
    suite.record([*ends, _line("power_sgd(rank=4)", 1.2), _line("diloco()", 1.4, lr=0.5)], path)
    cnn = json.loads(path.read_text())["trainings"]["cnn"]
    assert cnn["plans"] == {"power_sgd(rank=4, bits=4)": {"fewer": 60.0, "kept": {"1": 0.8, "0": 0.9}}}
    assert cnn["rates"] == {"0.5": {"diloco()": {"fewer": 60.0, "kept": {"1": 0.6}}}}
    assert cnn["training"] == {"width": 31.4, "steps": 300, "optimizer": "sgd", "noise": None}


def test_the_record_has_the_shapes_of_the_trainings(suite):
    for name in ("prose", "cnn"):
        model, held = suite.TRAININGS[name].model(0), quality.record()[name]
        assert held["shapes"] == {n: list(p.shape) for n, p in model.named_parameters()}
        assert held["buffers"] == {n: list(b.shape) for n, b in model.named_buffers() if b.is_floating_point()}
