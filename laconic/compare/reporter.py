"""How a training that `laconic compare` has started finds its plan and tells its losses: through a folder.

The folder's name is in the environment. Each worker writes its progress there, lines of JSON in a file of its own,
and the seconds of each collective in another: that needs no second connection between processes, outlives a worker
that dies, and can be read by anything. A training that nobody has started this way has no channel.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import IO

import torch.distributed as dist
from torch import Tensor

from laconic.compare.links import link
from laconic.compare.reporting import Goal, Progress, Reporting, Watch, control_group
from laconic.ledger import Ledger

FOLDER = "LACONIC_REPORT"
FLUSH_EVERY_S = 0.1


class Reporter:
    """Writes a worker's progress, a line for each report, seen by others at most a tenth of a second later."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._next_s = 0.0

    def __call__(self, progress: Progress) -> None:
        """Writes `progress`."""
        self._file.write(json.dumps(asdict(progress)) + "\n")
        now = time.monotonic()
        if now >= self._next_s or progress.ended or progress.step == progress.steps:
            self._file.flush()
            self._next_s = now + FLUSH_EVERY_S


def progress_file(folder: Path, worker: int) -> Path:
    """Where a worker writes its progress."""
    return folder / f"worker-{worker}.jsonl"


def seconds_file(folder: Path, worker: int) -> Path:
    """Where a worker writes the seconds of each collective."""
    return folder / f"worker-{worker}.seconds"


def about_file(folder: Path) -> Path:
    """Where worker 0 of a user's script says what it trains."""
    return folder / "about.json"


def goal_file(folder: Path) -> Path:
    """Where whoever starts a script writes when it is enough, and the link that is computed, if one is."""
    return folder / "goal.json"


class Channel:
    """What a talk under `laconic compare` has: the ledger that it keeps, and the reporting that starts with it."""

    def __init__(self, folder: Path) -> None:
        worker = dist.get_rank() if dist.is_initialized() else 0
        asked = json.loads(goal_file(folder).read_text())
        computed = asked.pop("computed")
        self._folder = folder
        self._goal = Goal(**asked)
        self._file = progress_file(folder, worker).open("w")
        self._seconds = seconds_file(folder, worker).open("wb", buffering=0)
        self.ledger = Watch(None if computed is None else link(computed), self._seconds)
        self._reporting: Reporting | None = None

    def start(self, plan: str, ledger: Ledger, group: dist.ProcessGroup | None, parameters: int) -> None:
        """Starts the clock, together on all workers."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            about_file(self._folder).write_text(json.dumps({"plan": plan, "parameters": parameters}))
        self._reporting = Reporting(Reporter(self._file), ledger, self._goal, control_group(group))

    def report(self, step: int, loss: float | Tensor, tokens: int) -> bool:
        """Tells of a step; returns whether it is enough."""
        assert self._reporting is not None
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        return bool(self._reporting.step(step, value, tokens).ended)

    def close(self) -> None:
        """Nothing more is told."""
        self._file.close()
        self._seconds.close()


def channel_from_env() -> Channel | None:
    """The channel to whoever started this training, if somebody listens."""
    folder = os.environ.get(FOLDER)
    return None if folder is None else Channel(Path(folder))
