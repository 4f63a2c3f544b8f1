"""`laconic compare` as a user runs it: workers, lines, table and JSON."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from laconic.tools.compare.runs import Outcome, TrainingRun, describe
from laconic.tools.launch.output import WorkerError
from laconic.tools.launch.workers import WorkerNetwork
from tests.cli.conftest import Ended, Run
from tests.cli.test_view import DDP

LOCAL = "post_local_sgd(period=4)"


def compare(outside: Run, tiny: list[str], plans: list[str], path: Path) -> Ended:
    given = [word for plan in plans for word in ("--plan", plan)]
    ended = outside(
        "-m",
        "laconic",
        "compare",
        "--no-baselines",
        *given,
        *tiny,
        "--workers",
        "2",
        "--steps",
        "8",
        "--json",
        str(path),
    )
    assert (ended.code, ended.err) == (0, "")
    rows = json.loads(path.read_text())
    assert [row["plan"] for row in rows] == plans
    for row in rows:
        assert row["steps"] == 8
        assert row["workers"] == 2
        assert row["seconds"] > 0
        assert row["loss_final"] < row["loss_start"]
        assert set(row["versions"]) == {"laconic", "torch", "python"}
    return ended


def test_compare(outside, tiny, tmp_path):
    path = tmp_path / "out.json"
    ended = compare(outside, tiny, ["ddp()", LOCAL], path)
    ddp, local = json.loads(path.read_text())
    assert ddp["wire_bytes"] == 8 * 4 * ddp["parameters"] + 48  # 48 for the handshake
    assert local["wire_bytes"] * 3 < ddp["wire_bytes"]
    assert path.stat().st_mode & 0o044 == 0o044  # like any file, though it began as a private temporary one
    assert list(tmp_path.iterdir()) == [path]

    lines = ended.out.splitlines()
    assert "\x1b" not in ended.out  # plain lines: not a terminal
    assert [line for line in lines if line.startswith("ddp() step=8/8 loss=")]
    assert [line for line in lines if line.startswith("post_local_sgd(period=4) done validation_loss=")]
    assert [line for line in lines if "validation loss" in line and "fewer" in line]
    assert sum(line.split()[:1] == ["ddp()"] and "1.0x" in line for line in lines) == 1


def test_the_baselines_run_beside_the_plans(here, monkeypatch):
    seen: list[list[str]] = []
    monkeypatch.setattr("laconic.cli.compare.run_all", lambda runs, _: seen.append([run.label for run in runs]))
    link = ["--link", "1gbit", "--hosts", "2"]
    for given in ([], ["--no-baselines"], ["--plan", "ddp( )"], ["--workers", "1"], [*link, "--until-loss", "2"], link):
        assert here("compare", "--plan", LOCAL, *given).code == 0
    assert seen == [
        ["ddp()", "alone()", LOCAL],
        [LOCAL],
        [LOCAL, "ddp()", "alone()"],
        [LOCAL],
        ["ddp()", "alone()", LOCAL, "ddp() without the slow link"],
        ["ddp()", "alone()", LOCAL],
    ]


@pytest.mark.nightly
def test_the_same_plan_gives_the_same_losses_and_others_send_less(outside, tiny, tmp_path):
    path = tmp_path / "out.json"
    ended = compare(outside, tiny, ["ddp()", "ddp()", "power_sgd(rank=1, bits=4)", LOCAL], path)
    ddp, again, low_rank, local = json.loads(path.read_text())
    assert {k: ddp[k] for k in ("loss_start", "loss_final")} == {k: again[k] for k in ("loss_start", "loss_final")}
    assert low_rank["wire_bytes"] * 10 < ddp["wire_bytes"]
    assert local["wire_bytes"] * 3 < ddp["wire_bytes"]
    lines = ended.out.splitlines()
    assert [line for line in lines if line.startswith("power_sgd(rank=1, bits=4) step=8/8 loss=")]
    assert sum(line.split()[:1] == ["ddp()"] and "1.0x" in line for line in lines) == 2


def test_a_stopped_comparison_goes_on_with_resume(here, tmp_path, monkeypatch):
    script, path, ran, fails = tmp_path / "train.py", tmp_path / "out.json", list[str](), True
    script.touch()

    def launched(run: TrainingRun, network: WorkerNetwork, view: object, index: int) -> Outcome:
        ran.append(run.label)
        if index == 1 and fails:
            raise WorkerError("stopped")
        return replace(DDP, plan=run.plan, settings=describe(run, network))

    monkeypatch.setattr("laconic.cli.compare._launch", launched)
    given = ["compare", "--no-baselines", "--script", str(script), "--workers", "2", "--plan", "ddp()", "--plan", LOCAL]
    given += ["--json", str(path)]
    assert here(*given).code == 1 and ran == ["ddp()", LOCAL]
    assert [row["plan"] for row in json.loads(path.read_text())] == ["ddp()"]
    fails = False
    again = here(*given, "--resume")
    assert again.out.startswith(f"ddp(): its results are in {path}\n") and ran[2:] == [LOCAL]
    assert [row["plan"] for row in json.loads(path.read_text())] == ["ddp()", LOCAL]
    here(*given, "--resume", "--seconds", "3")  # other settings
    assert ran[3:] == ["ddp()", LOCAL]
    here(*given)
    assert ran[5:] == ["ddp()", LOCAL]


@pytest.mark.slow
def test_on_own_text(outside, tiny, tmp_path):
    text = tmp_path / "book.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    given = ["--no-baselines", "--plan", "ddp()", "--workers", "2", "--steps", "2", "--data", str(text)]
    ended = outside("-m", "laconic", "compare", *tiny, *given)
    assert (ended.code, ended.err) == (0, "")
    assert "ddp() step=2/2" in ended.out
