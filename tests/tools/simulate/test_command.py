"""`laconic simulate` from its arguments to its output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from laconic.cli.main import make_app
from laconic.tools.errors import UsageError

SMALL = ("--steps", "4", "--layers", "1", "--width", "16")


def _run(*arguments: str) -> str:
    result = CliRunner().invoke(make_app("simulate"), ["simulate", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_every_step():
    plans = ("--plan", "ddp()", "--plan", "diloco(period=2)")
    runs = json.loads(_run("--workers", "3", *SMALL, *plans, "--link", "1mbit", "--fail", "1@3", "--json"))["runs"]
    assert [run["plan"] for run in runs] == ["ddp()", "diloco(period=2)"]
    for run in runs:
        assert [step["step"] for step in run["curve"]] == [1, 2, 3, 4]
        assert [len(step["losses"]) for step in run["curve"]] == [3, 3, 2, 2]
        assert run["left"] == 2 and run["loss"] == run["curve"][-1]["loss"]
        assert run["sent_bytes"] == run["level_bytes"]["world"] == run["curve"][-1]["sent_bytes"]
    assert runs[0]["sent_bytes"] > 2 * runs[1]["sent_bytes"]
    assert runs[0]["utilisation"] < runs[1]["utilisation"] < 1


def test_the_table_says_what_time_was_used_for():
    shown = _run("--workers", "2", *SMALL, "--step", "10ms", "--jitter", "0.5")
    assert "ddp() step=4/4 loss=" in shown
    assert "2 workers, 4 steps" in shown and "stragglers" in shown


def test_time_only():
    shown = json.loads(_run("--time-only", "--workers", "5000", "--steps", "20", "--link", "1gbit", "--json"))["runs"][
        0
    ]
    assert shown["workers"] == 5000 and shown["steps"] == 20 and 0 < shown["utilisation"] < 1
    assert "5,000 workers" in _run("--time-only", "--workers", "5000", "--steps", "20", "--model", "resnet")


def test_a_function_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    def loss(model, worker, step):\n"
        "        return (model(torch.full((1, 3), float(worker + 1))) - step).square().mean()\n"
        "    return torch.nn.Linear(3, 2), loss\n"
        "def wrong():\n"
        "    return torch.nn.Linear(3, 2)\n"
    )
    monkeypatch.chdir(tmp_path)
    run = json.loads(_run("--model", "mine:make", "--workers", "3", "--steps", "5", "--json"))["runs"][0]
    assert run["parameters"] == 8 and run["validation_loss"] is None and len(run["curve"]) == 5
    with pytest.raises(UsageError, match=r"mine:wrong: it returned Linear\. .* returns \(model, loss\)"):
        _run("--model", "mine:wrong")
    with pytest.raises(UsageError, match="mine:missing: AttributeError"):
        _run("--model", "mine:missing")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0"), "--workers 0: there must be at least 1"),
        (("--step", "50"), "--step 50: write a duration"),
        (("--jitter", "-1"), "--jitter -1: it must not be negative"),
        (("--time-only", "--fail", "1@2"), "the clock alone knows no faults"),
        (("--link", "fast"), "--link fast"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(UsageError, match=message):
        _run(*arguments)


def test_an_error_of_the_users_loss_ends_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "broken.py").write_text(
        "import torch\n"
        "def make():\n"
        "    def loss(model, worker, step):\n"
        "        if (worker, step) == (1, 2):\n"
        "            raise OSError('no more data')\n"
        "        return model(torch.ones(1, 3)).sum()\n"
        "    return torch.nn.Linear(3, 2), loss\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match="no more data"):
        _run("--model", "broken:make", "--workers", "3", "--steps", "5")
