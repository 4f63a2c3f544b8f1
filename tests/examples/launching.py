"""Processes that a test starts from examples/cluster: bounded in time, and ended by their id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from laconic import checkpoint

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"


def environment(**variables: str) -> dict[str, str]:
    """Return variables with which python, torchrun and laconic are those of the tests, and gloo uses the loopback."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return {**os.environ, **own, **variables}


class Launched:
    """A command with everything that it starts, and its output."""

    def __init__(self, command: Sequence[str], log: Path, variables: dict[str, str], cwd: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, cwd=cwd, env=environment(**variables), stdout=file, stderr=file, start_new_session=True
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float = 120) -> int:
        return self.process.wait(timeout_s)

    def workers(self) -> list[int]:
        """List the processes whose parent is this one and which run train.py."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def end(self) -> None:
        """Kill what is left: the command, and those of its descendants that have sessions of their own."""
        for pid in [*_descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


def _descendants(pid: int) -> list[int]:
    try:
        found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []
    return [each for child in found for each in [*_descendants(child), child]]


@contextmanager
def launched(commands: Sequence[tuple[Sequence[str], dict[str, str]]], folder: Path) -> Iterator[list[Launched]]:
    """Start commands, each with its variables, in `folder`; kill whatever is left at the end."""
    started: list[Launched] = []
    try:
        for index, (command, variables) in enumerate(commands):
            started.append(Launched(command, folder / f"output-{index}.txt", variables, folder))
        yield started
    finally:
        for each in started:
            each.end()


def wait_until(condition: Callable[[], object], started: Sequence[Launched], timeout_s: float = 90) -> None:
    """Wait until a condition is true."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "\n".join(each.output[-3000:] for each in started)
        time.sleep(0.05)


def same(one: object, other: object) -> bool:
    """Compare two states bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def saved(folder: Path, step: int, workers: int) -> list[object]:
    """The states of all workers at a step."""
    return [checkpoint.load(folder, step=step, worker=worker, workers=workers).state for worker in range(workers)]
