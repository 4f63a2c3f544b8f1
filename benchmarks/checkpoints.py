"""Saving and loading a checkpoint, beside a plain file of as many bytes, torch.save and torch.distributed.checkpoint.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --gb 0.5 --times 4 --folder /mnt/disk --json ratios.json

One process saves a state of fp32 tensors of 64 MB. "plain file": the same bytes in one sequential write and an fsync;
one sequential read into memory. All that is saved is synced to the disk before the clock stops, torch.save's file and
its folder too. Before every load the pages of all files are dropped from the system's cache (posix_fadvise), so that
the disk is read; the cache of a virtual machine's host cannot be dropped, and serves all contestants alike. Contestants
take turns in rotating order; a time is the median of the turns, a ratio the median of the turns' own.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch
import torch.distributed.checkpoint as dcp
from ratios import machine, write
from torch import Tensor

from laconic import checkpoint
from laconic.checkpoint.files import fsync_folder

PLAIN = "plain file"
TENSOR_BYTES = 64 << 20
BLOCK_BYTES = 16 << 20
State = dict[str, Tensor]


def synced(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
    fsync_folder(path.parent)


def plain_save(folder: Path, state: State) -> None:
    with (folder / "plain").open("wb", buffering=0) as file:
        for t in state.values():
            left = memoryview(t.numpy()).cast("B")
            while left:
                left = left[file.write(left[:BLOCK_BYTES]) :]
        os.fsync(file.fileno())
    fsync_folder(folder)


def plain_load(folder: Path, state: State) -> State:
    loaded = {name: torch.empty_like(t) for name, t in state.items()}
    with (folder / "plain").open("rb", buffering=0) as file:
        for t in loaded.values():
            left = memoryview(t.numpy()).cast("B")
            while left:
                left = left[file.readinto(left[:BLOCK_BYTES]) :]
    return loaded


def torch_save(folder: Path, state: State) -> None:
    torch.save(state, folder / "state.pt")
    synced(folder / "state.pt")


def dcp_save(folder: Path, state: State) -> None:
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    fsync_folder(folder)


def dcp_load(folder: Path, state: State) -> State:
    loaded = {name: torch.empty_like(t) for name, t in state.items()}
    dcp.load(loaded, checkpoint_id=folder / "dcp", no_dist=True)
    return loaded


CONTESTANTS: dict[str, tuple[Callable[[Path, State], Any], Callable[[Path, State], State]]] = {
    PLAIN: (plain_save, plain_load),
    "torch.save": (torch_save, lambda folder, _: torch.load(folder / "state.pt")),
    "torch.distributed.checkpoint": (dcp_save, dcp_load),
    "laconic.checkpoint": (
        lambda folder, state: checkpoint.save(folder / "ours", state, step=1),
        lambda folder, _: checkpoint.load(folder / "ours").state,
    ),
}


def drop_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def turn(name: str, folder: Path, state: State) -> tuple[float, float]:
    """Save to an empty folder, drop the cache, load and compare; return the seconds of both."""
    save, load = CONTESTANTS[name]
    folder.mkdir()
    try:
        os.sync()  # what others have written must not wait for its turn in ours
        saved_s, _ = timed(lambda: save(folder, state))
        drop_cache(folder)
        loaded_s, loaded = timed(lambda: load(folder, state))
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], t) for key, t in state.items()), name
        return saved_s, loaded_s
    finally:
        shutil.rmtree(folder)
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="size of the state")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where to write; it should be a disk")
    parser.add_argument("--json", help="write the ratios to this file")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", category=UserWarning)  # of torch.distributed.checkpoint, about one process
    count = max(1, round(options.gb * 1e9 / TENSOR_BYTES))
    state = {f"layer{i}.weight": torch.randn(TENSOR_BYTES // 4) for i in range(count)}
    total = count * TENSOR_BYTES
    print(f"{machine()}; {total / 1e9:.2f} GB in {count} tensors, {options.times} turns")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for number in range(options.times):
            names = list(CONTESTANTS)
            for name in names[number % len(names) :] + names[: number % len(names)]:  # none is always the first
                found[name].append(turn(name, Path(folder, "run"), state))
    ratios = {}
    print(f"{'':<30} {'save s':>7} {'MB/s':>6} {'x plain':>8} {'load s':>8} {'MB/s':>6} {'x plain':>8}")
    for name, turns in found.items():
        line = f"{name:<30}"
        for what, column in (("save", 0), ("load", 1)):
            seconds = statistics.median(each[column] for each in turns)
            ratio = statistics.median(
                each[column] / plain[column] for each, plain in zip(turns, found[PLAIN], strict=True)
            )
            line += f" {seconds:>7.2f} {total / seconds / 1e6:>6.0f} {ratio:>8.2f}"
            if name == "laconic.checkpoint":
                ratios[f"{what} {total / 1e9:.1f} GB, beside a plain file"] = ratio
        print(line)
    write(options.json, ratios)


if __name__ == "__main__":
    main()
