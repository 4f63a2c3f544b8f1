"""Damage of every kind is found, named, and stepped back from."""

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
from tests.checkpoint.nests import same

WORKERS = 2
FILES = [
    "manifest.json",
    "manifest.sha256",
    "worker-00000.json",
    "worker-00000.safetensors",
    "worker-00001.json",
    "worker-00001.safetensors",
]


def state_of(step: int, worker: int) -> dict[str, object]:
    return {"who": [step, worker], "w": torch.full((3,), float(10 * step + worker)), "b": torch.tensor([True, False])}


def save_all(folder: Path, step: int) -> None:
    """Save as both workers, one after the other: worker 0 begins, and completes when worker 1 is done."""
    first = checkpoint.save(folder, state_of(step, 0), step=step, worker=0, workers=2, barrier=list, wait=False)
    checkpoint.save(folder, state_of(step, 1), step=step, worker=1, workers=2, barrier=list)
    assert first.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (1, 2, 3):
        save_all(tmp_path, step)
    return tmp_path


def test_a_good_folder_loads(folder):
    for worker in (0, 1):
        saved = checkpoint.load(folder, worker=worker, workers=2)
        assert (saved.step, saved.skipped) == (3, ()) and same(saved.state, state_of(3, worker))
        assert same(checkpoint.load(folder, step=2, worker=worker).state, state_of(2, worker))
    assert [(g.step, g.workers, g.good) for g in checkpoint.verify(folder)] == [
        (1, 2, True),
        (2, 2, True),
        (3, 2, True),
    ]


@pytest.mark.parametrize("name", FILES)
def test_every_worker_takes_the_newest_good_generation_and_says_what_was_wrong(folder, name, caplog):
    flip(folder / "step-00000003" / name, bit=9)
    for worker in (0, 1):
        with caplog.at_level(logging.WARNING, "laconic.checkpoint"):
            saved = checkpoint.load(folder, worker=worker, workers=2)
        assert saved.step == 2 and same(saved.state, state_of(2, worker))
        (skipped,) = saved.skipped
        assert skipped.step == 3 and not skipped.good and "manifest" in skipped.problem
        assert f"{skipped.path} cannot be trusted and is passed over: {skipped.problem}" in caplog.text
    looked = checkpoint.verify(folder)
    assert [g.good for g in looked] == [True, True, False] and looked[2].problem == skipped.problem


def test_a_damaged_step_that_was_asked_for_is_an_error_with_both_digests(folder):
    path = folder / "step-00000002" / "worker-00001.safetensors"
    said = json.loads((folder / "step-00000002" / "manifest.json").read_text())["files"][path.name]["sha256"]
    flip(path, bit=-1)
    for worker in (0, 1):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(folder, step=2, worker=worker)
        assert f"load(step=2): {path.parent} cannot be trusted: worker-00001.safetensors has the SHA-256 " in str(
            caught.value
        )
        assert f"and the manifest says {said}: its bytes are not those that were saved" in str(caught.value)
        assert "Load without a step to take the newest good generation" in str(caught.value)
    assert same(checkpoint.load(folder, step=2, worker=0, check="own").state, state_of(2, 0))
    with pytest.raises(CheckpointError):
        checkpoint.load(folder, step=2, worker=1, check="own")


def test_none_is_good(folder):
    for step in (1, 2, 3):
        (folder / f"step-{step:08d}" / "worker-00000.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 3 generations in .* can be trusted") as caught:
        checkpoint.load(folder, worker=0)
    assert [(g.step, g.problem) for g in caught.value.skipped] == [
        (step, "worker-00000.json is missing.") for step in (3, 2, 1)
    ]
    assert "step 3: worker-00000.json is missing." in str(caught.value)


def test_there_is_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no checkpoint. To begin anew where there is none, ask generations"):
        checkpoint.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"load\(step=3\): .* has no such step. It has no checkpoint."):
        checkpoint.load(tmp_path, step=3)


def test_another_number_of_workers_is_refused_with_the_way_out(folder):
    flip(folder / "step-00000003" / "worker-00000.json", bit=3)
    with pytest.raises(
        CheckpointError, match=r"step-00000002 was saved by 2 workers, and 3 load it.*workers=3"
    ) as caught:
        checkpoint.load(folder, worker=0, workers=3)
    assert [g.step for g in caught.value.skipped] == [3]
    with pytest.raises(CheckpointError, match=r"saved by 2 workers, and 1 load it"):
        checkpoint.load(folder, step=1)
    with pytest.raises(CheckpointError, match="so it has no worker 2"):
        checkpoint.load(folder, worker=2)


def test_only_an_agreed_step_is_loaded_without_checking_the_others(folder):
    with pytest.raises(ValueError, match=r'check is "all", or "own" for a step that the workers have agreed on'):
        checkpoint.load(folder, worker=0, check="own")
    with pytest.raises(ValueError, match=r'check is "all"'):
        checkpoint.load(folder, worker=0, check="none")  # type: ignore[arg-type]


def test_generations_under_each_others_names_are_refused(folder):
    os.rename(folder / "step-00000002", folder / "two")
    os.rename(folder / "step-00000003", folder / "step-00000002")
    os.rename(folder / "two", folder / "step-00000003")
    assert checkpoint.load(folder, worker=0).step == 1
    assert [g.problem for g in checkpoint.verify(folder)][1:] == [
        "manifest.json is that of step 3, and lies where step 2 should.",
        "manifest.json is that of step 2, and lies where step 3 should.",
    ]


def test_a_quick_look_sees_what_is_missing_or_cut(folder):
    os.truncate(folder / "step-00000001" / "worker-00001.safetensors", 10)
    (folder / "step-00000002" / "worker-00001.json").unlink()
    assert [g.good for g in checkpoint.generations(folder)] == [False, False, True]
    assert "has 10 bytes, and the manifest says" in checkpoint.generations(folder)[0].problem


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    bit %= 8 * len(data)
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


Mutation = Callable[[random.Random, dict[str, bytes]], dict[str, bytes | None]]
"""From the bytes of the files to those of the files that change; None removes one."""


def flipped(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    name = rng.choice(FILES)
    data = bytearray(files[name])
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return {name: bytes(data)}


def cut(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    name = rng.choice(FILES)
    return {name: files[name][: rng.randrange(len(files[name]))]}


def grown(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    name = rng.choice(FILES)
    return {name: files[name] + rng.choice((b"\0", b" ", b"\n", rng.randbytes(rng.randrange(1, 40)), files[name]))}


def swapped_bytes(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    name = rng.choice(FILES)
    data = bytearray(files[name])
    i, j = rng.randrange(len(data)), rng.randrange(len(data))
    data[i], data[j] = data[j], data[i]
    return {name: bytes(data)}


def swapped_files(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    a, b = rng.sample(FILES, 2)
    return {a: files[b], b: files[a]}


def removed(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    return dict.fromkeys(rng.sample(FILES, rng.choice((1, 1, 2, 6))))


def blanked(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    name = rng.choice(FILES)
    begin = rng.randrange(len(files[name]))
    end = min(len(files[name]), begin + rng.choice((1, 16, 512)))
    return {name: files[name][:begin] + bytes(end - begin) + files[name][end:]}


def moved(rng: random.Random, files: dict[str, bytes]) -> dict[str, bytes | None]:
    name = rng.choice(FILES)
    begin = rng.randrange(1, len(files[name]))
    return {name: files[name][begin:] + files[name][:begin]}


MUTATIONS: list[Mutation] = [flipped, flipped, cut, grown, swapped_bytes, swapped_files, removed, blanked, moved]


def test_ten_thousand_damaged_checkpoints_none_of_which_loads(tmp_path):
    save_all(tmp_path, 1)
    save_all(tmp_path, 2)
    place = tmp_path / "step-00000002"
    files = {name: (place / name).read_bytes() for name in FILES}
    rng, done = random.Random(20), 0
    while done < 10_000:
        changed = {name: data for name, data in rng.choice(MUTATIONS)(rng, files).items() if data != files[name]}
        if not changed:
            continue
        done += 1
        for name, data in changed.items():
            (place / name).unlink() if data is None else (place / name).write_bytes(data)
        assert refused(tmp_path, worker=done % WORKERS), f"damage {done} to {list(changed)} went unnoticed"
        if done % 100 == 0:
            assert not checkpoint.verify(tmp_path)[1].good
            assert checkpoint.load(tmp_path, worker=done % WORKERS).step == 1
        for name in changed:
            (place / name).write_bytes(files[name])
    assert checkpoint.load(tmp_path, worker=0).step == 2


def refused(folder: Path, worker: int) -> bool:
    try:
        checkpoint.load(folder, step=2, worker=worker)
    except CheckpointError:
        return True
    return False


def test_a_copied_folder_is_as_good(folder, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy") / "folder"
    shutil.copytree(folder, copy)
    assert same(checkpoint.load(copy, worker=1).state, state_of(3, 1))
