"""What is said when a run fails: which worker, in which step, with which error, and where its whole log is."""

import re
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from laconic.tools.compare.progress import Tail, progress_file
from laconic.tools.compare.reporter import has_ended
from laconic.tools.compare.settings import Run, Script

CONSEQUENCES = ("connection closed", "connection reset", "broken pipe", "timed out", "lostworkererror", "by sigterm")
"""What the errors of workers contain that lost their peer, or that the launcher stopped."""
TRACEBACK = "Traceback (most recent call last)"
SHOWN_LINES = 20
_ERROR = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Interrupt|Exit)(?::.*)?(?:\n .*)*)$", re.MULTILINE)


class WorkerError(RuntimeError):
    """A worker failed. The message names the worker, the step and the error, and quotes the traceback."""


def worker_error(run: Run, folder: Path, exit_codes: Mapping[int, int]) -> WorkerError:
    """Name the worker that failed first, not one that failed or was stopped as a consequence.

    `exit_codes` are those of the workers that failed, the first one first. The logs of all are kept in one file.
    """
    first = next(iter(exit_codes))
    logs = {worker: read_log(folder, worker) for worker in (first, *range(run.workers))}
    errors = {worker: last_error(log) for worker, log in logs.items()}
    for worker, code in exit_codes.items():
        if code < 0 and (not errors[worker] or code != -signal.SIGTERM):
            errors[worker] = killed_by(code)
        elif not errors[worker]:
            errors[worker] = (logs[worker].splitlines() or [killed_by(code)])[-1]
    causes = [worker for worker, text in errors.items() if text and not any(x in text.lower() for x in CONSEQUENCES)]
    culprit = causes[0] if causes else first
    reports = Tail(progress_file(folder, culprit)).read()
    when = f"after step {reports[-1].step}" if reports else "at start"
    return WorkerError(
        f"worker {culprit} of {run.workers} of {run.title} failed {when}, with plan {run.plan}: "
        f"{errors[culprit].rstrip('.')}. The other workers were stopped."
        + "".join(f"\n  {line}" for line in last_traceback(logs[culprit]))
        + f"\nThe output of all workers is in {keep_logs(folder, run.workers)}."
    )


def aborted_after_end(run: Run, folder: Path, exit_codes: Mapping[int, int]) -> bool:
    """Whether signals alone ended workers of a script, and all of them had come to their end.

    A thread of gloo may abort an interpreter that shuts down (torch 2.13): "terminate called without an active
    exception".
    """
    ended = all(has_ended(folder, worker) for worker in range(run.workers))
    return isinstance(run, Script) and ended and all(code < 0 for code in exit_codes.values())


def read_log(folder: Path, worker: int, stream: str = "stderr") -> str:
    """What a worker wrote, without the prefix that torch adds to a traceback."""
    logs = sorted(folder.glob(f"*/attempt_0/{worker}/{stream}.log"))
    return re.sub(r"^\[rank\d+\]: ?", "", "".join(log.read_text(errors="replace") for log in logs), flags=re.M).strip()


def keep_logs(folder: Path, workers: int) -> Path:
    """Write what all workers wrote to a file that stays, when the folder of the run is removed."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="laconic-failed-", suffix=".log", errors="replace", delete=False
    ) as file:
        for worker in range(workers):
            for stream in ("stdout", "stderr"):
                file.write(f"==> worker {worker}, {stream} <==\n{read_log(folder, worker, stream)}\n")
    return Path(file.name)


def last_traceback(log: str) -> list[str]:
    """The last lines of the last traceback of a log, up to its error; none if there is no traceback.

    >>> last_traceback("step 1\\n" + TRACEBACK + ":\\n  f()\\nKeyError: 'a'\\na warning")
    ['Traceback (most recent call last):', '  f()', "KeyError: 'a'"]
    """
    _, found, after = log.rpartition(TRACEBACK)
    error = _ERROR.search(after)
    if not found or error is None:
        return []
    lines = (found + after[: error.end()]).splitlines()
    return lines if len(lines) <= SHOWN_LINES else [lines[0], "  ...", *lines[2 - SHOWN_LINES :]]


def last_error(log: str) -> str:
    """The last error of a log in one line, without its module; "" if there is none.

    >>> last_error("Traceback:\\n  f()\\ntorch.SomeError: no\\n  more\\na warning")
    'SomeError: no more'
    """
    found = _ERROR.findall(log)
    return " ".join(found[-1].split()) if found else ""


def killed_by(exit_code: int) -> str:
    """Describe how a process ended.

    >>> killed_by(-9), killed_by(3)
    ('killed by SIGKILL', 'it exited with code 3')
    """
    return f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"it exited with code {exit_code}"
