"""Run one worker's script and record how it ended: `python exit_recorder.py LIMIT_S FOLDER command...`.

Torch's launcher stops all workers as soon as one fails. The launcher therefore starts a recorder for each worker, which
starts the script. A recorder exits with code 0 when its script has ended, so that the other scripts go on. It kills a
script that a fault stopped for good when all other scripts have ended, and any script at the time limit.

This file imports only the standard library, and runs by itself.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

POLL_S = 0.05
KEPT_LINES = 200
PIPE_S = 2.0  # children of the script may keep its pipe open
PR_SET_PDEATHSIG = 1
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch writes it before each line of a worker's traceback


def exit_file(folder: Path, worker: int) -> Path:
    """The file in which a recorder writes how its script ended."""
    return folder / f"exit-{worker}.json"


def faults_file(folder: Path, worker: int) -> Path:
    """The file to which `laconic.doctor.injection` appends the faults of a worker."""
    return folder / f"faults-{worker}.jsonl"


def record(limit_s: float, folder: Path, command: list[str], worker: int, workers: int) -> None:
    """Run the command to its end, or to the limit, and write the exit file."""
    die_with_parent()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    child = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=die_with_parent)
    lines: deque[tuple[float, str]] = deque(maxlen=KEPT_LINES)
    reader = threading.Thread(target=_read, args=(child, lines), daemon=True)
    reader.start()
    try:
        killed = _wait(child, time.monotonic() + limit_s, folder, worker, workers)
    finally:
        child.kill()
    code = child.wait()
    reader.join(PIPE_S)
    path = exit_file(folder, worker)
    path.with_suffix(".new").write_text(json.dumps({"code": code, "killed": killed, "lines": list(lines)}))
    path.with_suffix(".new").rename(path)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _wait(child: "subprocess.Popen[bytes]", deadline: float, folder: Path, worker: int, workers: int) -> str:
    """Wait for the child; return when and why it is killed, or an empty string if it has ended by itself."""
    others = [exit_file(folder, other) for other in range(workers) if other != worker]
    while child.poll() is None:
        if time.monotonic() > deadline:
            return "killed at the time limit"
        if _stopped_for_good(folder, worker) and all(path.exists() for path in others):
            return "stopped, and killed when all other workers had ended"
        time.sleep(POLL_S)
    return ""


def _stopped_for_good(folder: Path, worker: int) -> bool:
    path = faults_file(folder, worker)
    faults = [json.loads(line)["fault"] for line in path.read_text().splitlines()] if path.exists() else []
    return any(fault.startswith("stop:") and fault.count(":") == 1 for fault in faults)


def _read(child: "subprocess.Popen[bytes]", lines: "deque[tuple[float, str]]") -> None:
    assert child.stderr is not None
    for line in child.stderr:
        lines.append((time.time(), RANK_PREFIX.sub("", line.decode(errors="replace").rstrip())))
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()


if __name__ == "__main__":
    record(float(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
