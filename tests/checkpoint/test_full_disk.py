"""A disk that fills while saving costs this save, and nothing else."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from tests.checkpoint.nests import same

OLD = {"w": torch.arange(100.0), "step": 1}
NEW = {"w": torch.arange(100.0) + 1, "step": 2}


def failing_after(calls: int, call: Callable[..., Any], once: bool) -> Callable[..., Any]:
    left = [calls]

    def limited(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == -1 or (left[0] < 0 and not once):
            raise OSError(errno.ENOSPC, "No space left on device")
        return call(*args, **options)

    return limited


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir", "open once", "rename once"])
def test_whatever_fails_the_older_generation_is_intact(tmp_path, monkeypatch, call, wait):
    checkpoint.save(tmp_path, OLD, step=1)
    (name, _, once), failures = call.partition(" "), 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing_after(failures, getattr(os, name), once=bool(once)))
            error = outcome(tmp_path, wait)
        if error is None:
            break
        cause = error.__cause__
        if isinstance(cause, CheckpointError):  # a file that was written could not be read
            cause = cause.__cause__
        assert isinstance(cause, OSError) and cause.errno == errno.ENOSPC
        assert "step 2 was not saved" in str(error) and "No space left on device" in str(error)
        assert "What was saved before is as it was. Make room" in str(error)
        # The last fsync comes after the rename: then the new one is in place, if not yet for certain.
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left in (["step-00000001"], ["step-00000001", "step-00000002"])
        assert same(checkpoint.load(tmp_path, step=1).state, OLD)
        failures += 1
    assert failures >= 1
    assert same(checkpoint.load(tmp_path).state, NEW)


def outcome(folder: Path, wait: bool) -> CheckpointError | None:
    try:
        saving = checkpoint.save(folder, NEW, step=2, wait=wait)
    except CheckpointError as error:
        assert wait
        return error
    saving.wait()
    return saving.error


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
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    assert same(checkpoint.load(folder).state, OLD)
    checkpoint.save(folder, NEW, step=4)
    assert same(checkpoint.load(folder).state, NEW)
