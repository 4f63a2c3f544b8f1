"""A checkpoint appears whole or not at all, and the older ones stay until it is there."""

from __future__ import annotations

import errno
import gc
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import checkpoint
from laconic.checkpoint import CheckpointError, files
from tests.checkpoint.trees import same


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def steps(*numbers: int) -> list[str]:
    return [f"step-{number:08d}" for number in numbers]


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "w": torch.full((5,), float(step))}


def save(folder: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        checkpoint.save(folder, state_of(step), step=step, keep=keep)


def file_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}" / "worker-00000.safetensors"


def test_the_last_few_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5)
    assert names(tmp_path) == steps(3, 4, 5)
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == steps(6)


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path):
    save(tmp_path, 1, 2, 3)
    for step in (2, 3):
        os.truncate(file_of(tmp_path, step), 3)
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == steps(1, 2, 3, 4)
    save(tmp_path, 5, keep=2)
    assert names(tmp_path) == steps(4, 5)


def test_steps_of_any_length_are_in_order(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000, 2**62)
    assert [each.step for each in checkpoint.checkpoints(tmp_path)] == [99_999_999, 100_000_000, 2**62]


def test_a_step_that_is_saved_again_is_replaced(tmp_path):
    save(tmp_path, 1)
    checkpoint.save(tmp_path, "again", step=1)
    assert checkpoint.load(tmp_path).state == "again"
    assert names(tmp_path) == steps(1)


def test_a_process_killed_while_it_replaces_loses_nothing(tmp_path):
    save(tmp_path, 1)
    os.rename(tmp_path / "step-00000001", tmp_path / ".step-00000001.old")
    assert same(checkpoint.load(tmp_path).state, state_of(1))
    save(tmp_path, 2)
    assert [each.step for each in checkpoint.verify(tmp_path) if each.good] == [1, 2]
    save(tmp_path, 3, 4)
    assert names(tmp_path) == steps(2, 3, 4)


def test_what_killed_processes_left_is_ignored_and_then_removed(tmp_path):
    save(tmp_path, 1)
    left = (
        ".step-00000007.0123abcd.tmp",
        ".step-00000001.old",
        ".step-00000002.0123abcd.tmp",
        ".step-00000003.0123abcd.gone",
    )
    for name in left:
        (tmp_path / name).mkdir()
        (tmp_path / name / "worker-00000.safetensors").write_text("{")
    assert [each.step for each in checkpoint.verify(tmp_path)] == [1]
    assert checkpoint.load(tmp_path).step == 1
    save(tmp_path, 2)
    assert names(tmp_path) == steps(1, 2)


def test_other_names_stay(tmp_path):
    others = [".step-7.tmp", ".step-00000007.tmp", "step-1", "step-00000001.bak", "notes.txt", "step-٠٠٠٠٠٠٠١"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".step-00000009.0123abcd.tmp").symlink_to(tmp_path / "notes.txt")
    save(tmp_path, 2)
    assert [each.step for each in checkpoint.checkpoints(tmp_path)] == [2]
    assert names(tmp_path) == sorted([*others, *steps(2)])


def test_steps_grow_until_a_rewind(tmp_path):
    save(tmp_path, 10, 20, 30)
    with pytest.raises(CheckpointError, match=r"already has step 30, which is later. A folder holds one run.*rewind"):
        save(tmp_path, 15)
    assert [each.step for each in checkpoint.rewind(tmp_path, 10)] == [20, 30]
    save(tmp_path, 15)
    assert names(tmp_path) == steps(10, 15)


def test_a_later_step_that_is_damaged_is_no_obstacle(tmp_path):
    save(tmp_path, 10, 20)
    file_of(tmp_path, 20).write_bytes(b"x" * file_of(tmp_path, 20).stat().st_size)
    save(tmp_path, 15)
    assert checkpoint.load(tmp_path).step == 15
    save(tmp_path, 20)
    assert checkpoint.load(tmp_path).step == 20


def test_a_rewind_to_a_damaged_step_removes_nothing(tmp_path):
    save(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"rewind\(step=3\): .* has no such step, but \[1, 2\]."):
        checkpoint.rewind(tmp_path, 3)
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: .*No such file .*manifest.json. Nothing was removed"):
        checkpoint.rewind(tmp_path, 1)
    assert names(tmp_path) == steps(1, 2)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"step": -1}, r"save\(step=-1\): step must be a whole number from 0 up"),
        ({"step": 1.0}, r"save\(step=1.0\)"),
        ({"step": True}, r"save\(step=True\)"),
        ({"step": 1, "keep": 0}, r"save\(keep=0\): keep must be a whole number from 1 up"),
        ({"step": 1, "timeout_s": 0}, r"timeout_s must be a number of seconds above 0"),
        ({"step": 1, "worker": 0}, r"save\(workers=None\): workers must be given with worker"),
        ({"step": 1, "worker": 2, "workers": 2}, "worker=2, workers=2: give whole numbers"),
        ({"step": 1, "workers": 2}, "worker=None, workers=2: give whole numbers"),
        ({"step": 1, "worker": 0, "workers": 2}, r"save\(workers=2, barrier=None\): the workers must wait for each"),
    ],
)
def test_invalid_calls_are_refused(tmp_path, call, text):
    with pytest.raises(ValueError, match=text):
        checkpoint.save(tmp_path, {}, **call)
    assert names(tmp_path) == []


def save_half(folder: Path, state: Any, step: int, worker: int, wait: bool = True) -> checkpoint.Saving:
    """Save as one of two workers. Worker 0 cannot finish before worker 1 has written."""
    return checkpoint.save(folder, state, step=step, worker=worker, workers=2, barrier=list, wait=wait)


def test_in_the_background_the_state_of_the_call_is_saved(tmp_path):
    weights = torch.zeros(4)
    saving = save_half(
        tmp_path, {"w": weights, "view": weights[::2], "c": torch.view_as_complex(weights.view(2, 2))}, 1, 0, wait=False
    )
    weights.add_(1)
    assert not saving.ended and [name[:15] for name in names(tmp_path)] == [".step-00000001."]
    save_half(tmp_path, None, 1, 1)
    assert saving.wait() and saving.error is None
    expected = {"w": torch.zeros(4), "view": torch.zeros(2), "c": torch.zeros(2, dtype=torch.complex64)}
    assert same(checkpoint.load(tmp_path, worker=0).state, expected)


def test_one_save_runs_at_a_time(tmp_path):
    first = save_half(tmp_path, 1, 1, 0, wait=False)
    ended_before_second: list[bool] = []

    def save_second() -> None:
        barrier = lambda: ended_before_second.append(first.ended)  # noqa: E731
        checkpoint.save(tmp_path, 2, step=2, worker=0, workers=2, barrier=barrier, timeout_s=0.1, wait=False).wait()

    thread = threading.Thread(target=save_second)
    thread.start()
    save_half(tmp_path, 1, 1, 1)
    thread.join()
    assert ended_before_second == [True, True]
    assert names(tmp_path) == steps(1)


def full(*args: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_in_the_background_is_logged_and_kept_but_not_its_tensors(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "laconic.checkpoint"):
        patch.setattr(os, "fsync", full)
        saving = checkpoint.save(tmp_path, {"w": torch.zeros(12_345)}, step=2, wait=False)
        assert not saving.wait()
        for thread in threading.enumerate():
            if thread.name == "save step 2":
                thread.join()
    assert isinstance(saving.error, CheckpointError) and saving.ended
    assert isinstance(saving.error.__cause__, OSError)
    assert "step 2 was not saved" in caplog.text and "No space left on device" in caplog.text
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Tensor and each.shape == (12_345,)]
    assert names(tmp_path) == steps(1)
    save(tmp_path, 3)
    assert checkpoint.load(tmp_path).step == 3


def test_ctrl_c_during_a_save_leaves_nothing_and_the_next_save_works(tmp_path, monkeypatch):
    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1)
    assert names(tmp_path) == []
    save(tmp_path, 2)
    assert names(tmp_path) == steps(2)


def test_what_is_removed_loses_its_name_before_its_contents(tmp_path, monkeypatch):
    """Else a file that another worker writes meanwhile keeps the folder there, and the others wait for its end."""
    path = files.make_temporary(tmp_path, 2)
    (path / "worker-00000.safetensors").write_bytes(b"0")
    remove = shutil.rmtree

    def remove_late(gone: Path, ignore_errors: bool) -> None:
        with pytest.raises(FileNotFoundError):
            (path / "worker-00001.json").write_bytes(b"")
        assert files.find_temporary(tmp_path, 2) is None
        remove(gone, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", remove_late)
    files.discard(path)
    assert names(tmp_path) == []


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*Not a directory"):
        checkpoint.load(tmp_path / "file")
    for folder in (tmp_path / "file", tmp_path / "file" / "deeper"):
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            checkpoint.save(folder, {}, step=1)


def test_a_state_of_too_long_names_is_refused(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"too long for a safetensors file: .*Join small tensors, or save lists"):
        checkpoint.save(tmp_path, {"x" * (50 << 20): torch.zeros(1)}, step=2)
    assert names(tmp_path) == steps(1)
