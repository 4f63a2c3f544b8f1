"""A process killed at any moment of a save leaves a folder that loads: the last checkpoint, or the new one."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint
from tests.checkpoint.trees import same
from tests.workers import run_workers


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "w": torch.full((300, 50), float(step)), "more": [torch.tensor(step + i) for i in range(10)]}


def keep_saving(folder: str, first: int, pipe: int) -> None:
    """Save step after step, every third one twice, and write the step to a pipe after each."""
    for step in range(first, first + 1_000_000):
        for _ in range(2 if step % 3 == 0 else 1):
            saving = checkpoint.save(folder, state_of(step), step=step, keep=2, wait=step % 2 == 0)
            assert saving.wait()
            os.write(pipe, f"{step}\n".encode())


def kill_and_check(worker: int, folder: str, times: int) -> int:
    """Start a process that saves, kill it and check, `times` times; return how often it left a temporary folder."""
    rng, newest, temporary = random.Random(4), 0, 0
    for _ in range(times):
        here, there = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                keep_saving(folder, newest + 1, there)
            finally:
                os._exit(1)
        os.close(there)
        reported = os.read(here, 1 << 16)  # from here on it is saving most of the time
        time.sleep(rng.uniform(0.0, 0.05))
        os.kill(process, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(process, 0)[1])
        with os.fdopen(here, "rb") as rest:
            newest = max(int(line) for line in (reported + rest.read()).split())
        temporary += bool(list(Path(folder).glob(".*")))
        newest = check(Path(folder), newest)
    checkpoint.save(folder, state_of(newest + 1), step=newest + 1, keep=2)
    assert not list(Path(folder).glob(".*"))
    return temporary


def check(folder: Path, reported: int) -> int:
    """Check that every checkpoint is good, and that the newest is the last reported one, or the one after it."""
    assert all(each.good for each in checkpoint.verify(folder))
    saved = checkpoint.load(folder)
    assert saved.step in (reported, reported + 1) and saved.skipped == ()
    assert same(saved.state, state_of(saved.step))
    return saved.step


def test_killed_at_any_moment(tmp_path):
    (temporary,) = run_workers(kill_and_check, workers=1, args=(str(tmp_path), 20), group=False)
    assert temporary > 0


class Killed(BaseException):
    """Stands for the end of the process."""


CHANGES = ["mkdir", "open", "chmod", "fsync", "rename", "unlink", "rmdir"]
"""The calls by which a save changes the disk, but for writing to files, which no other process reads yet."""


def killed_after(patch: pytest.MonkeyPatch, calls: int) -> None:
    """From some call on, none reaches the disk: what is there then is what a killed process leaves."""
    left = [calls]

    def wrapped(call: Any) -> Any:
        def limited(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return call(*args, **options)

        return limited

    for name in CHANGES:
        patch.setattr(os, name, wrapped(getattr(os, name)))


@pytest.mark.parametrize("step", [3, 4], ids=["replacing", "new"])
@pytest.mark.parametrize("keep", [1, 2])
def test_killed_between_any_two_system_calls(tmp_path, monkeypatch, step, keep):
    calls, after = 0, {"step": step, "after": torch.ones(3)}
    while True:
        folder = tmp_path / str(calls)
        for each in (1, 2, 3):
            checkpoint.save(folder, state_of(each), step=each, keep=3)
        with monkeypatch.context() as patch:
            killed_after(patch, calls)
            try:
                checkpoint.save(folder, after, step=step, keep=keep)
                break
            except Killed:
                calls += 1
        saved = checkpoint.load(folder)
        assert same(saved.state, after) if "after" in saved.state else same(saved.state, state_of(3))
        assert saved.skipped == () and all(each.good for each in checkpoint.verify(folder))
        checkpoint.save(folder, "next", step=9, keep=keep)
        assert len(os.listdir(folder)) == keep
    assert calls > 20
