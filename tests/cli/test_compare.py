"""`laconic compare` as a user runs it: workers, lines, table and JSON."""

import json
from pathlib import Path

import pytest

from laconic.cli import running
from laconic.tools.compare.inputs import given_files
from laconic.tools.compare.settings import Script
from laconic.tools.compare.unfinished import Finished
from laconic.tools.launch.failures import WorkerError
from tests.cli.conftest import Ended, Run
from tests.cli.test_results import DDP

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
        assert row["wire_bytes"] == row["sent_bytes"]  # each of two workers sends all of it
        assert set(row["versions"]) == {"laconic", "torch", "python"}
    return ended


def test_compare(outside, tiny, tmp_path):
    path = tmp_path / "out.json"
    ended = compare(outside, tiny, ["ddp()", LOCAL], path)
    ddp, local = json.loads(path.read_text())
    assert ddp["sent_bytes"] == 8 * 4 * ddp["parameters"] + 48  # 48 for the handshake
    assert local["sent_bytes"] * 3 < ddp["sent_bytes"]
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
    monkeypatch.setattr("laconic.cli.compare.run_all", lambda runs, *_: seen.append([run.label for run in runs]))
    link = ["--link", "1gbit", "--hosts", "2"]
    for given in ([], ["--no-baselines"], ["--plan", "ddp( )"], ["--workers", "1"], [*link, "--until-loss", "2"], link):
        assert here("compare", "--plan", LOCAL, *given).code == 0
    assert seen == [
        ["ddp()", "alone()", LOCAL],
        [LOCAL],
        [LOCAL, "ddp( )", "alone()"],
        [LOCAL],
        ["ddp()", "alone()", LOCAL, "ddp() without the slow link"],
        ["ddp()", "alone()", LOCAL],
    ]


@pytest.mark.nightly
def test_the_same_plan_gives_the_same_losses_and_others_send_less(outside, tiny, tmp_path):
    path = tmp_path / "out.json"
    ended = compare(outside, tiny, ["ddp()", "ddp()", "power_sgd(rank=1)", LOCAL], path)
    ddp, again, low_rank, local = json.loads(path.read_text())
    assert {k: ddp[k] for k in ("loss_start", "loss_final")} == {k: again[k] for k in ("loss_start", "loss_final")}
    assert low_rank["sent_bytes"] * 10 < ddp["sent_bytes"]
    assert local["sent_bytes"] * 3 < ddp["sent_bytes"]
    lines = ended.out.splitlines()
    assert [line for line in lines if line.startswith("power_sgd(rank=1) step=8/8 loss=")]
    assert sum(line.split()[:1] == ["ddp()"] and "1.0x" in line for line in lines) == 2


def test_a_stopped_comparison_does_not_use_results_of_a_script_that_has_changed(here, tmp_path, monkeypatch):
    script, ran, fails = tmp_path / "train.py", list[str](), True
    script.write_text("one")

    def launched(run: Script, network: object, view: object, index: int) -> Finished:
        ran.append(run.plan)
        if index == 1 and fails:
            raise WorkerError("stopped")
        return Finished(DDP, given_files(run))

    monkeypatch.setattr(running, "_launch", launched)
    given = ["compare", "--no-baselines", "--script", str(script), "--workers", "2", "--plan", "ddp()", "--plan", LOCAL]
    assert here(*given).code == 1 and ran == ["ddp()", LOCAL]
    again = here(*given)
    assert again.out.startswith("continuing after 1 of 2 plans") and ran[2:] == [LOCAL]
    script.write_text("two")
    fails = False
    changed = here(*given)
    assert (changed.code, ran[3:]) == (0, ["ddp()", LOCAL])
    assert changed.out.startswith(f"{script} has changed: results from before are not used again\n")
