"""Runs a user's own script under observation: up to `laconic.session.session`, or with faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from laconic.compare.launch import environment, run_elastic
from laconic.compare.settings import LabError
from laconic.compare.slow_link import PROGRAM
from laconic.doctor import witness
from laconic.doctor.injection import INJECT, MARKS, UNTIL, Fault

WITNESS = Path(witness.__file__)
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch puts it before each line of a worker's traceback
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*(?P<kind>[A-Z]\w*(?:Error|Exception|Interrupt|Exit))\b(?::|$)")


@dataclass(frozen=True)
class Visit:
    """A script, how it is called, and for how long it may run."""

    script: Path
    arguments: tuple[str, ...] = ()
    workers: int = 2
    limit_s: float = 300.0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise LabError(f"--workers {self.workers}: there must be at least 1. Use --workers 2 or more.")
        if not self.limit_s > 0:
            raise LabError(f"--seconds {self.limit_s:g}: it must be a number above 0. Leave it out for the default.")
        if not self.script.is_file():
            raise LabError(f"--script {self.script}: there is no such file. Give the path of a training script.")

    @property
    def environ(self) -> dict[str, str]:
        """What tells the script's `laconic.session.session` what to do."""
        return {INJECT: ",".join(map(str, self.faults))} if self.faults else {UNTIL: "attach"}

    def command(self, folder: Path) -> tuple[str, ...]:
        """A worker's command, around which a witness stands. Both end with whoever started them."""
        entered = (sys.executable, str(PROGRAM), "enter", "null")
        watched = (sys.executable, "-I", "-S", str(WITNESS), str(self.limit_s), str(folder))
        return (*entered, *watched, *entered, sys.executable, str(self.script), *self.arguments)


@dataclass(frozen=True)
class Ended:
    """How one worker's script ended, and what it said last, each line with its time."""

    worker: int
    code: int
    at: float
    lines: tuple[tuple[float, str], ...]
    ended_because: str = ""

    @property
    def error(self) -> tuple[float, str] | None:
        """When the error that ended it was said, and the first line of that error."""
        return next(((at, line) for at, line in reversed(self.lines) if _ERROR.match(line)), None)

    @property
    def error_class(self) -> str:
        """The class of that error, without its module."""
        match = _ERROR.match(self.error[1]) if self.error else None
        return match["kind"] if match else ""

    @property
    def last_words(self) -> str:
        """The error, or else the last line."""
        return self.error[1] if self.error else next((line for _, line in reversed(self.lines) if line.strip()), "")


@dataclass(frozen=True)
class Mark:
    """A fault that a worker has made."""

    fault: str
    at: float


def visit_here(visit: Visit, folder: Path) -> list[Ended]:
    """Starts all workers on this machine, and waits for them."""
    command = visit.command(folder)
    with (
        environment({**visit.environ, MARKS: str(folder)}, visit.workers),
        suppress(ChildFailedError),
    ):  # a witness that was ended has written nothing
        run_elastic(visit.workers, folder, 0, *command)
    return [read_ended(folder, worker) for worker in range(visit.workers)]


def visit_as_worker(visit: Visit, folder: Path, worker: int, port: int) -> Ended:
    """Starts the script as this worker of a run whose other workers are elsewhere."""
    environ = {**os.environ, **visit.environ, MARKS: str(folder), "MASTER_PORT": str(port)}
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"  # the launcher's own store already knows other workers: us
    with (folder / "script.log").open("wb") as log, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            visit.command(folder), env=environ, stdout=log, stderr=log, timeout=visit.limit_s + 30, check=False
        )
    return read_ended(folder, worker)


def read_ended(folder: Path, worker: int) -> Ended:
    """How a worker ended; one without a witness's word was ended from outside."""
    path = witness.ended_file(folder, worker)
    if not path.exists():
        return Ended(worker, -1, 0.0, (), "its witness was ended, too")
    told = json.loads(path.read_text())
    lines = tuple((float(at), _RANK.sub("", str(line), count=1)) for at, line in told["lines"])
    return Ended(worker, int(told["code"]), float(told["time"]), lines, str(told["ended_because"]))


def read_marks(folder: Path) -> list[Mark]:
    """The faults that were made, oldest first."""
    lines = [line for path in sorted(folder.glob("faults-*.jsonl")) for line in path.read_text().splitlines()]
    marks = [json.loads(line) for line in lines]
    return sorted((Mark(str(mark["fault"]), float(mark["time"])) for mark in marks), key=lambda mark: mark.at)


def read_attached(folder: Path, worker: int) -> Mapping[str, Any] | None:
    """What a worker noted at the end of `laconic.session.session`, if it came so far."""
    path = folder / f"attached-{worker}.json"
    return json.loads(path.read_text()) if path.exists() else None


def warnings_of(ended: Sequence[Ended]) -> list[str]:
    """What `attach` itself warned of, each once."""
    said = (line for each in ended for _, line in each.lines if line.startswith("attach: "))
    return list(dict.fromkeys(said))


def ended_from(worker: int, said: Mapping[str, Any] | None) -> Ended:
    """How another worker tells that its script ended."""
    if said is None:
        return Ended(worker, -1, 0.0, (), "it said nothing in time")
    told = said["ended"]
    lines = tuple((float(at), str(line)) for at, line in told["lines"])
    return Ended(worker, int(told["code"]), float(told["at"]), lines, str(told["ended_because"]))
