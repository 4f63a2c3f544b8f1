"""A generation appears whole or not at all; the older ones stay until it is there."""

from __future__ import annotations

import errno
import gc
import logging
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from laconic.checkpoint.attempt import Attempt
from laconic.checkpoint.folder import locked, name_of
from laconic.checkpoint.tensors import snapshot
from tests.checkpoint.nests import same


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def state_of(step: int) -> dict[str, object]:
    return {"step": step, "w": torch.full((5,), float(step))}


def save(folder: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        checkpoint.save(folder, state_of(step), step=step, keep=keep)


def test_the_last_few_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3, 4, 5)
    assert names(tmp_path) == ["step-00000003", "step-00000004", "step-00000005"]
    save(tmp_path, 6, keep=1)
    assert names(tmp_path) == ["step-00000006"]


def test_damaged_generations_do_not_count_as_kept(tmp_path):
    save(tmp_path, 1, 2, 3)
    for step in (2, 3):
        os.truncate(tmp_path / name_of(step) / "worker-00000.json", 3)
    save(tmp_path, 4, keep=2)
    assert names(tmp_path) == [name_of(step) for step in (1, 2, 3, 4)]
    save(tmp_path, 5, keep=2)
    assert names(tmp_path) == [name_of(step) for step in (4, 5)]


def test_steps_of_any_length_are_in_order(tmp_path):
    save(tmp_path, 99_999_999, 100_000_000, 2**62)
    assert [generation.step for generation in checkpoint.generations(tmp_path)] == [99_999_999, 100_000_000, 2**62]


def test_a_step_saved_again_is_replaced(tmp_path):
    save(tmp_path, 1)
    checkpoint.save(tmp_path, "again", step=1)
    assert checkpoint.load(tmp_path).state == "again"
    assert names(tmp_path) == ["step-00000001"]


def test_a_process_killed_while_it_replaces_loses_nothing(tmp_path):
    save(tmp_path, 1)
    os.rename(tmp_path / name_of(1), tmp_path / name_of(1, "old"))
    assert same(checkpoint.load(tmp_path).state, state_of(1))
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_what_killed_processes_left_is_ignored_and_then_removed(tmp_path):
    save(tmp_path, 1)
    for way in ("tmp", "gone"):
        (tmp_path / name_of(7, way)).mkdir()
        (tmp_path / name_of(7, way) / "worker-00000.json").write_text("{")
    (tmp_path / name_of(1, "old")).mkdir()
    assert [generation.step for generation in checkpoint.verify(tmp_path)] == [1]
    assert checkpoint.load(tmp_path).step == 1
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_same_step_is_saved_over_what_was_left_of_it(tmp_path):
    (tmp_path / name_of(2, "tmp")).mkdir()
    (tmp_path / name_of(2, "tmp") / "worker-00000.json").write_text("{")
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_what_another_process_is_writing_stays(tmp_path):
    other = tmp_path / name_of(7, "tmp")
    other.mkdir()
    with locked(other):
        save(tmp_path, 2)
        assert other.is_dir()
        with pytest.raises(CheckpointError, match=r"tmp is there already: another process is saving step 7"):
            save(tmp_path, 7)
        assert other.is_dir()
    save(tmp_path, 8)
    assert names(tmp_path) == ["step-00000002", "step-00000008"]


def test_names_that_are_not_ours_stay(tmp_path):
    ours_not = [".step-7.tmp", "step-1", "step-00000001.bak", ".step-00000001.tmp~", "notes.txt", "step-٠٠٠٠٠٠٠١"]
    for name in ours_not:
        (tmp_path / name).mkdir()
    (tmp_path / name_of(9, "tmp")).symlink_to(tmp_path / "notes.txt")
    save(tmp_path, 2)
    assert [generation.step for generation in checkpoint.generations(tmp_path)] == [2]
    assert names(tmp_path) == sorted([*ours_not, "step-00000002", name_of(9, "tmp")])


def test_steps_only_grow_unless_told(tmp_path):
    save(tmp_path, 10, 20, 30)
    with pytest.raises(CheckpointError, match=r"already has step 30, which is later. A folder holds one run.*rewind"):
        save(tmp_path, 15)
    assert [generation.step for generation in checkpoint.rewind(tmp_path, 10)] == [20, 30]
    save(tmp_path, 15)
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_a_later_step_that_is_damaged_is_no_obstacle(tmp_path):
    save(tmp_path, 10, 20)
    (tmp_path / name_of(20) / "worker-00000.json").write_bytes(
        b"x" * os.path.getsize(tmp_path / name_of(20) / "worker-00000.json")
    )
    save(tmp_path, 15)
    assert checkpoint.load(tmp_path).step == 15
    save(tmp_path, 20)
    assert checkpoint.load(tmp_path).step == 20


def test_rewinding_to_what_is_not_good_removes_nothing(tmp_path):
    save(tmp_path, 1, 2)
    with pytest.raises(CheckpointError, match=r"rewind\(step=3\): .* has no such step. It has the steps 1, 2."):
        checkpoint.rewind(tmp_path, 3)
    (tmp_path / name_of(1) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be trusted: manifest.json is missing. Nothing was removed"):
        checkpoint.rewind(tmp_path, 1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"step": -1}, r"save\(step=-1\): step must be a whole number from 0 up"),
        ({"step": 1.0}, r"save\(step=1.0\)"),
        ({"step": True}, r"save\(step=True\)"),
        ({"step": 1, "keep": 0}, r"save\(keep=0\): keep must be a whole number from 1 up"),
        ({"step": 1, "timeout_s": 0}, r"timeout_s must be a number of seconds above 0"),
        ({"step": 1, "worker": 0}, r"save\(worker=0\): say of how many"),
        ({"step": 1, "worker": 2, "workers": 2}, "workers count from 0, so the last is 1"),
        ({"step": 1, "workers": 2}, "worker=None, workers=2: give whole numbers"),
        (
            {"step": 1, "worker": 0, "workers": 2},
            r"save\(workers=2, barrier=None\): the workers must wait for each other",
        ),
    ],
)
def test_calls_that_mean_nothing_are_refused(tmp_path, call, text):
    with pytest.raises(ValueError, match=text):
        checkpoint.save(tmp_path, {}, **call)
    assert names(tmp_path) == []


def test_in_the_background_the_state_of_the_call_is_saved(tmp_path, monkeypatch):
    go = threading.Event()
    run = Attempt.run
    monkeypatch.setattr(Attempt, "run", lambda *args: go.wait(10) and run(*args))
    weights = torch.zeros(4)
    handle = checkpoint.save(tmp_path, {"w": weights, "view": weights[::2]}, step=1, wait=False)
    weights.add_(1)
    assert repr(handle) == "<Saving step 1: under way>"
    assert names(tmp_path) == [".step-00000001.tmp"]
    go.set()
    assert handle.wait() and handle.ended and handle.error is None
    assert repr(handle) == "<Saving step 1: in place>"
    assert same(checkpoint.load(tmp_path).state, {"w": torch.zeros(4), "view": torch.zeros(2)})


def test_one_save_is_in_flight_at_a_time(tmp_path, monkeypatch):
    running: list[int] = []
    most = []
    run = Attempt.run

    def counted(attempt, *args):
        running.append(attempt.step)
        most.append(len(running))
        run(attempt, *args)
        running.remove(attempt.step)

    monkeypatch.setattr(Attempt, "run", counted)
    handles = [checkpoint.save(tmp_path, state_of(step), step=step, wait=False) for step in range(1, 6)]
    assert all(handle.wait() for handle in handles)
    assert max(most) == 1
    assert checkpoint.load(tmp_path).step == 5


def test_an_error_in_the_background_is_logged_and_kept(tmp_path, monkeypatch, caplog):
    save(tmp_path, 1)
    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "laconic.checkpoint"):
        patch.setattr(os, "fsync", full)
        handle = checkpoint.save(tmp_path, state_of(2), step=2, wait=False)
        assert not handle.wait()
    assert isinstance(handle.error, CheckpointError) and repr(handle) == "<Saving step 2: failed>"
    assert isinstance(handle.error.__cause__, OSError)
    assert "step 2 was not saved" in caplog.text and "No space left on device" in caplog.text
    assert names(tmp_path) == ["step-00000001"]
    save(tmp_path, 3)
    assert checkpoint.load(tmp_path).step == 3


def test_an_error_does_not_hold_on_to_the_tensors(tmp_path, monkeypatch):
    copies: list[weakref.ref[Tensor]] = []

    def noted(t: Tensor) -> Tensor:
        copy = snapshot(t)
        copies.append(weakref.ref(copy))
        return copy

    with monkeypatch.context() as patch:
        patch.setattr("laconic.checkpoint.saving.snapshot", noted)
        patch.setattr(os, "write", full)
        handle = checkpoint.save(tmp_path, state_of(1), step=1, wait=False)
        assert not handle.wait()
    for thread in threading.enumerate():
        if thread.name == "saving step 1":
            thread.join()
    gc.collect()
    assert len(copies) == 1 and copies[0]() is None


def full(*args: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_ctrl_c_while_saving_leaves_nothing_and_the_next_save_works(tmp_path, monkeypatch):
    def interrupted(*args: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 1)
    save(tmp_path, 2)
    assert names(tmp_path) == ["step-00000002"]


def test_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot be listed: .*Not a directory"):
        checkpoint.load(tmp_path / "file")
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        checkpoint.save(tmp_path / "file", {}, step=1)
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        checkpoint.save(tmp_path / "file" / "deeper", {}, step=1)
