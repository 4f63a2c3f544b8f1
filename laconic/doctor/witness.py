"""Runs one worker's script as a child, and writes down how it ended: `python witness.py LIMIT_S FOLDER command...`.

Torch's launcher ends all workers as soon as one fails, and then nobody can see what the others would have said. So it
is given witnesses instead of scripts: a witness always ends well, and only once its script has ended. Of a script that
was stopped for good it is told by the marks in FOLDER, and ends it when all the other scripts are over.

This file imports the standard library alone and runs by itself.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import FrameType

POLL_S = 0.05
KEPT_LINES = 200
PIPE_S = 2.0  # children of the script may hold its pipe open


def ended_file(folder: Path, worker: int) -> Path:
    """Where a witness writes how its script ended."""
    return folder / f"ended-{worker}.json"


def faults_file(folder: Path, worker: int) -> Path:
    """Where a worker notes its faults; `laconic.doctor.injection` writes it."""
    return folder / f"faults-{worker}.jsonl"


def watch(limit_s: float, folder: Path, command: list[str], environ: dict[str, str]) -> None:
    """Runs the command to its end, or to the limit, and writes what is to be known."""
    worker, workers = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    child = subprocess.Popen(command, stderr=subprocess.PIPE, env=environ)
    signal.signal(signal.SIGTERM, lambda number, frame: _leave(child, number, frame))
    lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
    reader.start()
    why = _wait(child, time.monotonic() + limit_s, folder, worker, workers)
    if why:
        child.kill()
    code = child.wait()
    told = {"code": code, "time": time.time(), "ended_because": why}
    reader.join(PIPE_S)
    path = ended_file(folder, worker)
    path.with_suffix(".new").write_text(json.dumps(told | {"lines": list(lines)}))
    path.with_suffix(".new").rename(path)


def _wait(child: "subprocess.Popen[bytes]", until: float, folder: Path, worker: int, workers: int) -> str:
    """Waits for the child; returns why it must be ended, or nothing if it has ended by itself."""
    others = [ended_file(folder, other) for other in range(workers) if other != worker]
    while child.poll() is None:
        if time.monotonic() > until:
            return "it took too long"
        if _stopped_for_good(folder, worker) and all(path.exists() for path in others):
            return "it was stopped for good, and all others had ended"
        time.sleep(POLL_S)
    return ""


def _stopped_for_good(folder: Path, worker: int) -> bool:
    path = faults_file(folder, worker)
    marks = [json.loads(line)["fault"] for line in path.read_text().splitlines()] if path.exists() else []
    return any(mark.startswith("stop:") and mark.count(":") == 1 for mark in marks)


def _read(child: "subprocess.Popen[bytes]", lines: "deque[tuple[float, str]]") -> None:
    assert child.stderr is not None
    for line in child.stderr:
        lines.append((time.time(), line.decode(errors="replace").rstrip()))
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


def _leave(child: "subprocess.Popen[bytes]", number: int, frame: FrameType | None) -> None:
    child.kill()
    os._exit(128 + number)


if __name__ == "__main__":
    watch(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], dict(os.environ))
