"""`laconic compare` as a user runs it: over a link, with a script, stopped and continued."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT
from tests.namespaces import needs_root
from tests.tools.launch.processes import descendants, eventually, namespaces_alive, namespaces_held_by, running

SMALL = ["--layers", "1", "--width", "64", "--context", "32"]


def rows_of(path: Path) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(path.read_text())
    return rows


@contextmanager
def comparing(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "laconic", "compare", "--no-baselines", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: "subprocess.Popen[str]", start: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return
    raise AssertionError(f"no line began with {start!r}")


@pytest.fixture
def short_tmp(monkeypatch) -> Iterator[str]:
    """A temporary folder for one command, with a short name, as socket paths are limited."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setenv("TMPDIR", name)
        yield name


def ours_in(folder: str) -> list[str]:
    """The content of a folder without torch's cache."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor")]


@pytest.mark.slow
class TestAsRoot:
    pytestmark = needs_root

    def test_the_bytes_are_those_of_the_interfaces(self, outside, tmp_path):
        path, page = tmp_path / "out.json", tmp_path / "out.html"
        plans = [
            "--plan",
            "ddp()",
            "--plan",
            "power_sgd(rank=4, bits=None)",
            "--plan",
            "post_local_sgd(period=2)",
        ]
        given = ["--link", "2 @ 1gbit, 2 @ 50mbit", "--steps", "8", *plans, "--json", str(path), "--report", str(page)]
        ended = outside("-m", "laconic", "compare", "--no-baselines", *given, "--layers", "2")
        assert (ended.code, ended.err) == (0, "")
        for row in rows_of(path):
            assert (row["workers"], row["link"], row["clock"]) == (4, "2 @ 1gbit, 2 @ 50mbit", "measured")
            assert row["network_bytes"] == pytest.approx(row["interface_bytes"], rel=0.03)
            assert len(row["uplink_bytes"]) == 2  # type: ignore[arg-type]
            assert [point["step"] for point in row["curve"]] == list(range(1, 9))  # type: ignore[attr-defined]
            assert 0 <= row["waiting_seconds"] <= row["communication_seconds"] <= row["seconds"]  # type: ignore[operator]
        ddp, low_rank, _ = rows_of(path)
        # 8 steps, each of which sends 1.5 times the model over a link of 50 Mbit/s
        assert ddp["seconds"] > 0.9 * 8 * 1.5 * 4 * ddp["parameters"] * 8 / 50e6  # type: ignore[operator]
        assert low_rank["network_bytes"] < ddp["network_bytes"] / 2  # type: ignore[operator]
        assert "a real link of 2 @ 1gbit, 2 @ 50mbit" in page.read_text()

    def test_killed_and_continued(self, tmp_path, short_tmp):
        path = tmp_path / "out.json"
        plans = ["--plan", "post_local_sgd(period=2)", "--plan", "ddp()"]
        given = ["--link", "10mbit", "--hosts", "2", "--steps", "12", *SMALL, *plans, "--json", str(path)]
        with comparing(*given) as process:
            read_until(process, "ddp() step=")
            family = descendants(process.pid)
            held = namespaces_held_by(family)
            assert len(held) == 3
            process.send_signal(signal.SIGKILL)
        assert eventually(lambda: not running(family))
        assert not namespaces_alive(held)
        assert ours_in(short_tmp)  # its run folder, which the next run removes

        with comparing(*given, "--resume") as process:
            out, err = process.communicate(timeout=120)
        assert (process.returncode, err) == (0, "")
        assert out.startswith(f"post_local_sgd(period=2): its results are in {path}\n")
        assert "post_local_sgd(period=2) step=" not in out
        assert [row["plan"] for row in rows_of(path)] == ["post_local_sgd(period=2)", "ddp()"]
        assert ours_in(short_tmp) == []

    def test_ctrl_c_leaves_nothing(self, short_tmp):
        with comparing("--link", "10mbit", "--hosts", "2", "--steps", "1000", *SMALL, "--plan", "ddp()") as process:
            read_until(process, "ddp() step=")
            family = descendants(process.pid)
            held = namespaces_held_by(family)
            assert held
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGINT
        assert err == "laconic: stopped by SIGINT; no worker is left behind.\n"
        assert eventually(lambda: not running(family))
        assert not namespaces_alive(held)
        assert ours_in(short_tmp) == []


@pytest.mark.slow
def test_where_no_link_can_be_made_its_time_is_computed(outside, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ip, no tc
    path, page = tmp_path / "out.json", tmp_path / "out.html"
    given = ["--link", "1mbit", "--hosts", "2", "--plan", "ddp()", "--json", str(path), "--report", str(page)]
    ended = outside("-m", "laconic", "compare", "--no-baselines", *tiny, *given, "--seconds", "2")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith(
        "no real link of 1mbit can be made here (the command ip of iproute2 is not installed): the runs go at full "
        "speed, and the link's time is computed from the bytes that they send.\n"
    )
    assert "(computed)" in ended.out
    [row] = rows_of(path)
    assert (row["clock"], row["link"], row["interface_bytes"]) == ("computed", "1mbit", None)
    # each step of this model takes 2/3 of a second on the link, so the first check ends the run
    assert (row["ended"], row["steps"]) == ("seconds", 4)
    assert row["seconds"] > 4 * row["wire_bytes"] / 4 * 8 / 1e6  # type: ignore[operator]
    assert "<strong>Computed:</strong>" in page.read_text()


@pytest.mark.slow
def test_the_example_script_until_a_loss(outside, tmp_path):
    path = tmp_path / "out.json"
    plans = ["--plan", "ddp()", "--plan", "power_sgd(rank=2)"]
    given = ["--script", "examples/own_script.py", "--workers", "2", "--until-loss", "0.03", "--json", str(path)]
    ended = outside("-m", "laconic", "compare", "--no-baselines", *given, *plans, "--", "300")
    assert (ended.code, ended.err) == (0, "")
    for row, plan in zip(rows_of(path), ("ddp()", "power_sgd(rank=2, bits=4)"), strict=True):
        assert (row["plan"], row["model"], row["loss_of"], row["ended"]) == (plan, "own_script.py", "training", "loss")
        assert row["loss_final"] <= 0.03  # type: ignore[operator]
        assert 8 < row["steps"] < 300  # type: ignore[operator]
        assert row["steps"] % 4 == 0  # type: ignore[operator]
        assert row["parameters"] == 296_449
    assert "own_script.py, 296,449 parameters, 2 workers, until training loss 0.03" in ended.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "4"], "--hosts 4: hosts are connected by a link. Add one, such as --link 100mbit."),
        (["--link", "fast"], "--link fast: write a rate"),
        (["--link", "1gbit", "--hosts", "2", "--workers", "3"], "there is one worker per host. Leave out --workers."),
        (["--link", "1gbit", "--hosts", "0"], "--hosts 0: there must be at least 1."),
        (
            ["--link", "2 @ 1gbit, 2 @ 1mbit", "--hosts", "8"],
            "these levels hold 2 x 2 = 4 workers, and 8 were asked for.",
        ),
        (["--seconds", "0"], "--seconds 0: it must be a number above 0."),
        (["--until-loss", "nan"], "--until-loss nan: it must be a number above 0."),
        (["--script", "no/such.py"], "--script no/such.py: there is no such file."),
        (["--", "5"], "-- 5: these are for a script. Give one with --script train.py."),
        (["--report", "."], "--report .: that is a folder. Name a file in it, such as results.html."),
    ],
)
def test_mistakes(here, arguments, words):
    ended = here("compare", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""


def test_torchrun_has_started_the_workers(here, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended = here("compare")
    assert ended.code == 2
    assert "laconic compare: torchrun has already started the workers" in ended.err
