"""Run folders: those of ended processes are removed, others stay."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from laconic.tools.launch.workers import LOCK, PREFIX, run_folder

HOLD = """
import sys, time
from laconic.tools.launch.workers import run_folder
with run_folder() as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_a_folder_is_removed_at_the_end_of_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder() as folder:
        (folder / "file").write_text("something")
        with run_folder() as other:
            assert folder.exists()  # its owner is this process
            assert other != folder
    assert list(tmp_path.iterdir()) == []


def test_the_next_run_removes_the_folder_of_a_killed_process(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin"}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        held = owner.stdout.readline().strip()
        (tmp_path / f"{PREFIX}strange").mkdir()  # without a lock file: it may be in use
        with run_folder():
            assert held in map(str, tmp_path.iterdir())
        owner.kill()
    assert held in map(str, tmp_path.iterdir())
    with run_folder():
        assert held not in map(str, tmp_path.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == [f"{PREFIX}strange"]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="reads /proc to find processes")
def test_the_next_run_ends_the_processes_that_a_killed_run_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned, running = tmp_path / f"{PREFIX}a", tmp_path / f"{PREFIX}b"
    for folder in (abandoned, running):
        folder.mkdir()
    (abandoned / LOCK).touch()
    sleepers = [
        subprocess.Popen(["sleep", "60"], env={**os.environ, "LACONIC_RUN_FOLDER": str(folder)})
        for folder in (abandoned, running)
    ]
    try:
        with run_folder():
            assert sleepers[0].wait(timeout=30) == -signal.SIGKILL
            assert sleepers[1].poll() is None and not abandoned.exists() and running.exists()
    finally:
        for each in sleepers:
            each.kill()
            each.wait()
