"""A disk that fills while saving costs this save, and nothing else."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from tests.checkpoint.trees import same

OLD = {"w": torch.arange(100.0), "step": 1}
NEW = {"w": torch.arange(100.0) + 1, "step": 2}


class Failing:
    """A function of the system that fails after some calls, once or from then on."""

    def __init__(self, call: Callable[..., Any], after: int, once: bool = False) -> None:
        self.call, self.left, self.once = call, after, once

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == -1 or (self.left < 0 and not self.once):
            raise OSError(errno.ENOSPC, "No space left on device")
        return self.call(*args, **options)


def error_of(folder: Path, wait: bool, state: Any = NEW) -> CheckpointError | None:
    try:
        saving = checkpoint.save(folder, state, step=2, wait=wait)
    except CheckpointError as error:
        assert wait
        return error
    saving.wait()
    return saving.error


def check_failed(folder: Path, error: CheckpointError, reason: str) -> None:
    assert "step 2 was not saved" in str(error) and reason in str(error)
    assert "The older checkpoints are as they were." in str(error) and "free some space" in str(error)
    # The last fsync comes after the rename: then the new one is in place, although that may not survive a crash.
    assert sorted(os.listdir(folder)) in (["step-00000001"], ["step-00000001", "step-00000002"])
    assert same(checkpoint.load(folder, step=1).state, OLD)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("call", ["fsync", "rename", "mkdir", "open once", "rename once"])
def test_whichever_call_fails_the_older_checkpoint_is_intact(tmp_path, monkeypatch, call, wait):
    (name, _, once), failures = call.partition(" "), 0
    for after in itertools.count():
        folder = tmp_path / str(after)
        checkpoint.save(folder, OLD, step=1)
        failing = Failing(getattr(os, name), after, once=bool(once))
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing)
            error = error_of(folder, wait)
        if error is None:
            assert same(checkpoint.load(folder).state, NEW)
        else:
            check_failed(folder, error, "No space left on device")
            failures += 1
        if failing.left >= 0:
            break
    assert failures >= 1


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let the system refuse to write more than this to any file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("state", [NEW, "small"], ids=["large tensors", "large manifest"])
def test_wherever_writing_stops_the_older_checkpoint_is_intact(tmp_path, wait, state):
    checkpoint.save(tmp_path, OLD, step=1)
    for size_bytes in range(0, 10_000, 20):
        with largest_file(size_bytes):
            error = error_of(tmp_path, wait, state)
        if error is None:
            break
        check_failed(tmp_path, error, "File too large")
    assert size_bytes > 200
    assert same(checkpoint.load(tmp_path).state, state)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 256 kB."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small tmpfs")
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.root
@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_is_really_full(small_disk, wait):
    folder = small_disk / "checkpoints"
    checkpoint.save(folder, OLD, step=1)
    large = {"w": torch.zeros(200_000)}
    for step in (2, 3):
        if wait:
            with pytest.raises(CheckpointError, match="No space left on device"):
                checkpoint.save(folder, large, step=step)
        else:
            saving = checkpoint.save(folder, large, step=step, wait=False)
            assert not saving.wait() and "No space left on device" in str(saving.error)
    assert os.listdir(folder) == ["step-00000001"]
    assert same(checkpoint.load(folder).state, OLD)
    checkpoint.save(folder, NEW, step=4)
    assert same(checkpoint.load(folder).state, NEW)
