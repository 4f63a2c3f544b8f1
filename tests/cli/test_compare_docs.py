"""docs/compare.md: its commands parse, its names exist, its images exist."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import fields

import pytest

import laconic
from laconic.cli.compare import CompareOptions
from laconic.tools.compare.judging import judgements
from laconic.tools.compare.runs import Outcome, Script, TrainingRun
from tests.cli.conftest import ROOT
from tests.cli.test_view import DDP

TEXT = (ROOT / "docs" / "compare.md").read_text()
BLOCKS = [block for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL) if block.startswith("laconic ")]
OPTIONS = sorted(set(re.findall(r"`(--[a-z-]+)[ `]", TEXT)))


@pytest.fixture
def parsed(monkeypatch) -> list[tuple[Sequence[TrainingRun], CompareOptions]]:
    """The runs and options that `compare` would start."""
    calls: list[tuple[Sequence[TrainingRun], CompareOptions]] = []
    monkeypatch.setattr("laconic.cli.compare.run_all", lambda runs, options: calls.append((runs, options)))
    return calls


def test_its_commands_parse(here, parsed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert len(BLOCKS) == 2
    for block in BLOCKS:
        ended = here(*shlex.split(block.replace("\\\n", " "))[1:])
        assert (ended.code, ended.err) == (0, "")
    (runs, options), (own, _) = parsed
    plans = ["ddp()", "alone()", "power_sgd(rank=20)", "frugal(bytes='120x')", "ddp()"]  # the last without the link
    assert [run.plan for run in runs] == [laconic.plan(text) for text in plans]
    assert (runs[0].workers, runs[0].goal.until_loss, str(options.link)) == (4, 2.08, "10mbit")
    assert isinstance(own[0].training, Script)
    assert own[0].training.arguments == ("--your", "--arguments")


def test_its_options_exist(here, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    known = here("compare", "--help").out
    assert len(OPTIONS) > 8
    assert [option for option in OPTIONS if option not in known] == []


def test_its_numbers_are_in_the_json():
    table = TEXT[TEXT.index("| in `--json` |") : TEXT.index("`network_bytes` and")]
    named = [name for row in re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]
    assert len(named) == 18
    assert set(named) <= {field.name for field in fields(Outcome)} | set(judgements(DDP, [DDP]))


def test_its_three_lines_are_those_of_the_example():
    example = (ROOT / "examples" / "own_script.py").read_text()
    added = [line[2:].strip() for line in TEXT.splitlines() if line.startswith("+ ")]
    assert added == [
        "import laconic",
        "session = laconic.attach(laconic.plan_from_env(), model, optimizer)",
        "if session.report(loss=loss): break",
    ]
    assert added[0] in example
    assert added[1] in example
    assert "if session.report(loss=loss" in example


def test_its_images_exist_and_are_small():
    images = re.findall(r"\((images/[^)]+)\)", TEXT)
    assert len(images) == 4
    for image in images:
        assert 10_000 < (ROOT / "docs" / image).stat().st_size < 200_000
