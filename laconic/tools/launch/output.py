"""What workers write while they run, and why one failed: the error or the signal that ended it."""

from __future__ import annotations

import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from threading import Event, Thread

CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "timed out", "lostworkererror", "by sigterm")
"""What the errors of workers contain that lost their peer, or that the launcher stopped."""
TRACEBACK = "Traceback (most recent call last)"
READ_EVERY_S = 0.1
SHOWN_LINES = 20
MOST_LOG_BYTES = 1 << 20
"""How much is read of what a worker wrote to a stream: a script may print without end."""
_ERROR = re.compile(r"(?:[A-Za-z_]\w*\.)*((?=[A-Z_])\w*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$")
_ABORT = re.compile(r"\s*what\(\): |Fatal Python error|\[[EF]\d{4} ")
_NOISE = re.compile(r"\s|\[[WI]\d{4} |.*\b\w*Warning\b|terminate called|WARNING\b")
"""Lines that do not explain why a process ended: indented ones, and warnings of Python and of torch's C++."""


class Tail:
    """Reads the lines that were added to a file since the last read. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def read(self, at_end: bool = False) -> list[str]:
        """Return the new complete lines, in order; `at_end`, also a last line without a line end."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                added = file.read()
        except FileNotFoundError:
            return []
        added = added if at_end else added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(added)
        return added.decode(errors="replace").splitlines()


@contextmanager
def following(path: Path, show: Callable[[str], None]) -> Iterator[None]:
    """Call `show` for every line that is added to a file while the block runs."""
    tail = Tail(path)
    done = Event()

    def read_all() -> None:
        for line in tail.read():
            show(line)

    def follow() -> None:
        while not done.wait(READ_EVERY_S):
            read_all()
        read_all()

    thread = Thread(target=follow, name="laconic-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def worker_file(folder: Path, worker: int, kind: str = "stderr") -> Path:
    """The file with what a worker writes: its stderr, its stdout, or what it reports."""
    return folder / f"worker-{worker}.{kind}"


def read_log(folder: Path, worker: int, stream: str = "stderr") -> list[str]:
    """The lines that a worker wrote, without empty ones: the last ones, if it wrote more than `MOST_LOG_BYTES`."""
    path = worker_file(folder, worker, stream)
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - MOST_LOG_BYTES))
        lines = file.read(MOST_LOG_BYTES).decode(errors="replace").splitlines()
    return [without_rank(line) for line in lines if line.strip()]


def without_rank(line: str) -> str:
    """A line without the prefix that torch writes before each line of a worker's traceback.

    >>> without_rank("[rank1]:   f()")
    '  f()'
    """
    return re.sub(r"^\[rank\d+\]: ?", "", line.rstrip())


# Why a worker failed.


class WorkerError(RuntimeError):
    """A worker failed. The message names the worker and the error, and quotes the traceback; `reason` is the error."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


def worker_error(
    folder: Path,
    workers: int,
    exit_codes: Mapping[int, int],
    title: str,
    reached: Mapping[int, str],
    ended: Sequence[int] = (),
) -> WorkerError:
    """Name the worker that failed first, not one that failed as a consequence.

    `exit_codes` are those of the workers that failed, the first one first, `reached` says how far each worker came,
    such as " after step 3", and `ended` are the workers that had ended without an error. The logs of all workers are
    kept in one file.
    """
    first = next(iter(exit_codes))
    logs = {worker: read_log(folder, worker) for worker in (first, *range(workers))}
    # a worker that still ran may have logged the error that the others failed of
    reasons = {worker: " ".join(last_error(log)) for worker, log in logs.items()}
    reasons |= {worker: reason(code, logs[worker]) for worker, code in exit_codes.items()}
    causes = [worker for worker, text in reasons.items() if text and not is_consequence(text)]
    culprit = causes[0] if causes else first
    early = ""
    if ended and not causes:
        early = (
            f" Worker {ended[0]} had ended without an error{reached.get(ended[0], '')}: do all workers take the same "
            "number of steps?"
        )
    return WorkerError(
        f"worker {culprit} of {workers} of {title} failed{reached.get(culprit, '')}: "
        f"{reasons[culprit].rstrip('.')}.{early} The other workers were stopped."
        + "".join(f"\n  {line}" for line in last_traceback(logs[culprit]))
        + f"\nThe output of all workers is in {_keep_logs(folder, workers)}.",
        reasons[culprit],
    )


def is_consequence(reason: str) -> bool:
    """Whether a worker failed because another one did, or because the launcher stopped it."""
    return any(text in reason.lower() for text in CONSEQUENCES)


def reason(exit_code: int, log: Sequence[str], killed: str = "") -> str:
    """Say in one line why a process ended: its error, else how it ended, and the last line that may explain it.

    `killed` is what to say instead of the signal's name.

    >>> reason(1, ["Traceback:", "  f()", "torch.SomeError: no", "  more", "a.py:3: UserWarning: slow"])
    'SomeError: no more'
    >>> reason(-6, ["terminate called after throwing", "  what():  closed by peer"])
    'killed by SIGABRT; its last line: what():  closed by peer'
    """
    error = " ".join(last_error(log))
    aborts = [line.strip() for line in reversed(log) if _ABORT.match(line)]
    last = (error, *aborts, *(line for line in reversed(log) if may_explain(line)), *reversed(log), "")
    line = next(filter(None, last), "")
    if exit_code > 0 and line:
        return line
    return (killed or killed_by(exit_code)) + (f"; its last line: {line}" if line else "")


def may_explain(line: str) -> bool:
    """Whether a line of a log may explain why a process ended: it is neither indented nor a warning."""
    return not _NOISE.match(line)


def find_error(log: Sequence[str]) -> int | None:
    """Return the number of the line with which the last error begins; None if there is none."""
    return next((number for number in reversed(range(len(log))) if _ERROR.match(log[number])), None)


def last_error(log: Sequence[str]) -> list[str]:
    """The lines of the last error of a log, each without its indent, and without the module of its class.

    >>> last_error(["Traceback:", "  f()", "torch.SomeError: no", "  more", "a warning"])
    ['SomeError: no', 'more']
    """
    number = find_error(log)
    if number is None:
        return []
    return [_ERROR.sub(r"\1", log[number]), *(line.strip() for line in _indented(log[number + 1 :]))]


def _indented(lines: Sequence[str]) -> list[str]:
    return list(takewhile(lambda line: line.startswith(" "), lines))


def last_traceback(log: Sequence[str]) -> list[str]:
    """The last lines of the last traceback of a log, up to the end of its error; none if there is no traceback.

    >>> last_traceback(["step 1", TRACEBACK + ":", "  f()", "KeyError: 'a'", "a warning"])
    ['Traceback (most recent call last):', '  f()', "KeyError: 'a'"]
    """
    starts = [number for number, line in enumerate(log) if line.startswith(TRACEBACK)]
    after = log[starts[-1] :] if starts else []
    first = next((number for number, line in enumerate(after) if _ERROR.match(line)), None)
    if first is None:
        return []
    lines = [*after[: first + 1], *_indented(after[first + 1 :])]
    return lines if len(lines) <= SHOWN_LINES else [lines[0], "  ...", *lines[2 - SHOWN_LINES :]]


def killed_by(exit_code: int) -> str:
    """Describe how a process ended.

    >>> killed_by(-9), killed_by(3)
    ('killed by SIGKILL', 'it exited with code 3')
    """
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"it exited with code {exit_code}"


def _keep_logs(folder: Path, workers: int) -> Path:
    """Write what all workers wrote to a file that stays, when the folder of the run is removed."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="laconic-failed-", suffix=".log", errors="replace", delete=False
    ) as file:
        for worker in range(workers):
            for stream in ("stdout", "stderr"):
                lines = "\n".join(read_log(folder, worker, stream))
                file.write(f"==> worker {worker}, {stream} <==\n{lines}\n")
    return Path(file.name)
