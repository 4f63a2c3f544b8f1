"""Damage of every kind is found and named, and the newest good checkpoint is used instead."""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from tests.checkpoint.trees import same

FILES = ["manifest.json", "worker-00000.safetensors", "worker-00001.safetensors"]


def state_of(step: int, worker: int) -> dict[str, object]:
    return {"who": [step, worker], "w": torch.full((3,), float(10 * step + worker)), "b": torch.tensor([True, False])}


def save_all(folder: Path, step: int) -> None:
    """Save as two workers, one after the other: worker 0 begins, and completes when worker 1 has written."""
    first = checkpoint.save(folder, state_of(step, 0), step=step, worker=0, workers=2, barrier=list, wait=False)
    checkpoint.save(folder, state_of(step, 1), step=step, worker=1, workers=2, barrier=list)
    assert first.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_all(tmp_path, step)
    return tmp_path


def test_a_good_folder_loads_and_so_does_a_copy_of_it(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "folder"
    shutil.copytree(folder, copy)
    for worker in (0, 1):
        for place in (folder, copy):
            saved = checkpoint.load(place, worker=worker, workers=2)
            assert (saved.step, saved.skipped) == (3, ()) and same(saved.state, state_of(3, worker))
        assert same(checkpoint.load(folder, step=2, worker=worker).state, state_of(2, worker))
    assert [(c.step, c.workers, c.good) for c in checkpoint.verify(folder)] == [(s, 2, True) for s in (1, 2, 3)]


@pytest.mark.parametrize("name", FILES)
def test_every_worker_uses_the_newest_good_checkpoint_and_names_the_damage(folder, name, caplog):
    flip(folder / "step-00000003" / name, bit=9)
    verified = checkpoint.verify(folder)
    assert [each.good for each in verified] == [True, True, False] and name in verified[2].problem
    for worker in (0, 1):
        with caplog.at_level(logging.WARNING, "laconic.checkpoint"):
            saved = checkpoint.load(folder, worker=worker, workers=2)
        assert saved.step == 2 and same(saved.state, state_of(2, worker))
        assert saved.skipped == (verified[2],)
        assert f"{verified[2].path} is damaged and was skipped: {verified[2].problem}" in caplog.text


def test_loading_a_damaged_step_is_an_error_with_both_digests(folder):
    path = folder / "step-00000002" / "worker-00001.safetensors"
    listed = json.loads((path.parent / "manifest.json").read_text())["files"][path.name]["sha256"]
    flip(path, bit=-1)
    for worker in (0, 1):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, step=2, worker=worker)
        assert f"load(step=2): no good checkpoint in {folder}" in str(caught.value)
        assert "step 2: worker-00001.safetensors has the SHA-256 " in str(caught.value)
        assert f"but manifest.json lists {listed}: its bytes are not those that were saved" in str(caught.value)
        assert "Load another step" in str(caught.value)
    assert same(checkpoint.load(folder, step=2, worker=0, check="own").state, state_of(2, 0))
    with pytest.raises(CheckpointError):
        checkpoint.load(folder, step=2, worker=1, check="own")


def test_no_checkpoint_is_good(folder):
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}" / "worker-00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no good checkpoint in .*\n  step 3: .*worker-0"):
        checkpoint.load(folder, worker=0)


def test_there_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"there is none.\n.* checkpoints\(folder\) is empty where nothing"):
        checkpoint.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"load\(step=3\): .* has no such step, but \[\]."):
        checkpoint.load(tmp_path, step=3)


def test_another_number_of_workers_is_refused_with_the_way_out(folder):
    flip(folder / "step-00000003" / "worker-00000.safetensors", bit=3)
    with pytest.raises(CheckpointError, match=r"step-00000002 was saved by 2 workers, and each has its own.*resize"):
        checkpoint.load(folder, worker=0, workers=3)
    with pytest.raises(CheckpointError, match=r"load\(worker=0, workers=1\): .* was saved by 2 workers"):
        checkpoint.load(folder, step=1)
    with pytest.raises(CheckpointError, match=r"load\(worker=2, workers=None\): .* was saved by 2 workers"):
        checkpoint.load(folder, worker=2)


def test_only_an_agreed_step_is_loaded_without_checking_the_other_workers(folder):
    with pytest.raises(ValueError, match=r'check must be "all", or "own" for a step that the workers have agreed on'):
        checkpoint.load(folder, worker=0, check="own")
    with pytest.raises(ValueError, match=r'check must be "all"'):
        checkpoint.load(folder, worker=0, check="none")  # type: ignore[arg-type]


def test_a_checkpoint_under_the_name_of_another_is_refused(folder):
    os.rename(folder / "step-00000002", folder / "two")
    os.rename(folder / "step-00000003", folder / "step-00000002")
    os.rename(folder / "two", folder / "step-00000003")
    assert checkpoint.load(folder, worker=0).step == 1
    assert "version 3 and step 2 with" in checkpoint.verify(folder)[1].problem
    assert "version 3 and step 3 with" in checkpoint.verify(folder)[2].problem


def test_listing_finds_missing_and_truncated_files(folder):
    os.truncate(folder / "step-00000001" / "worker-00001.safetensors", 10)
    (folder / "step-00000002" / "worker-00001.safetensors").unlink()
    assert [each.good for each in checkpoint.checkpoints(folder)] == [False, False, True]
    assert "has 10 bytes, but manifest.json lists" in checkpoint.checkpoints(folder)[0].problem


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def overwritten(data: bytes, begin: int, patch: bytes) -> bytes:
    return data[:begin] + patch[: len(data) - begin] + data[begin + len(patch) :]


def flipped(rng: random.Random, data: bytes) -> bytes:
    for begin in rng.sample(range(len(data)), rng.choice((1, 1, 1, 2, 8))):
        data = overwritten(data, begin, bytes([data[begin] ^ 1 << rng.randrange(8)]))
    return data


def swapped(rng: random.Random, data: bytes) -> bytes:
    i, j = rng.randrange(len(data)), rng.randrange(len(data))
    return overwritten(overwritten(data, i, data[j : j + 1]), j, data[i : i + 1])


IN_ONE_FILE: list[Callable[[random.Random, bytes], bytes]] = [
    flipped,
    flipped,
    swapped,
    lambda rng, data: data[: rng.randrange(len(data))],
    lambda rng, data: data + rng.choice((b"\0", b" ", b"\n", rng.randbytes(rng.randrange(1, 40)), data)),
    lambda rng, data: overwritten(data, rng.randrange(len(data)), bytes(rng.choice((1, 16, 512)))),
    lambda rng, data: data[(begin := rng.randrange(1, len(data))) :] + data[:begin],
]
"""Flipped bits, swapped bytes, and a file that is truncated, grown, zeroed in part, or rotated."""


def mutated(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    """Return the files that change; None removes one."""
    kind = rng.randrange(len(IN_ONE_FILE) + 2)
    if kind == len(IN_ONE_FILE):
        return dict.fromkeys(rng.sample(FILES, rng.choice((1, 1, 2, 3))))
    if kind > len(IN_ONE_FILE):
        a, b = rng.sample(FILES, 2)
        return {a: files[b], b: files[a]}
    name = rng.choice(FILES)
    return {name: IN_ONE_FILE[kind](rng, files[name])}


def test_none_of_ten_thousand_damaged_checkpoints_loads(tmp_path):
    save_all(tmp_path, 1)
    save_all(tmp_path, 2)
    place = tmp_path / "step-00000002"
    files = {name: (place / name).read_bytes() for name in FILES}
    rng, done = random.Random(20), 0
    while done < 10_000:
        changed = {name: data for name, data in mutated(rng, files).items() if data != files[name]}
        if not changed:
            continue
        done += 1
        for name, data in changed.items():
            (place / name).unlink() if data is None else (place / name).write_bytes(data)
        with pytest.raises(CheckpointError):
            checkpoint.load(tmp_path, step=2, worker=done % 2)
        if done % 100 == 0:
            assert not checkpoint.verify(tmp_path)[1].good
            assert checkpoint.load(tmp_path, worker=done % 2).step == 1
        for name in changed:
            (place / name).write_bytes(files[name])
    assert checkpoint.load(tmp_path, worker=0).step == 2
