"""Run the selected upstream tests, one at a time, each in its own process group (in the sense of POSIX).

torch's own harness (`MultiProcessTestCase`) runs the workers of a test and checks their exit codes. Here they are
forked from a process that has already imported torch, which saves ten seconds per test. A test that exceeds its time
limit fails, and all processes that it started are killed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
import unittest
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.parity import cpu, selection, twin

LIMIT_S = 240.0
GRACE_S = 20.0
"""Extra time for the harness to start the workers, and to write their stacks at a timeout."""

TWIN_LOGGER = "laconic"

Outcome = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Result:
    """The outcome of one upstream test. `reason` is empty if it passed; `log` is its output."""

    test: str
    outcome: Outcome
    reason: str
    seconds: float
    log: str = ""


@dataclass(frozen=True)
class Driver:
    """The names of the selected tests, and `case`, the test class that has them."""

    tests: tuple[str, ...]
    case: type[Any]

    def run(self, tests: Sequence[str], limit_s: float = LIMIT_S) -> Iterator[Result]:
        """Run these tests one after the other."""
        for test in tests:
            yield _run_alone(self.case, test, limit_s)


def prepare(package: str | None) -> Driver:
    """Import upstream's tests with the modules of `package` instead of torch's; with None, with torch's own.

    This changes torch for the whole process and cannot be undone, so a process can prepare only once.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(cpu.WORLD_SIZE), TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    if package is None:
        modules = frozenset(importlib.import_module(name) for name in twin.REPLACED_MODULES)
    else:
        modules = frozenset(twin.replace_modules(package).values())
    upstream = cpu.upstream()
    return Driver(selection.tests_of(upstream, modules), _case(upstream, is_twin=package is not None))


def _case(upstream: Any, *, is_twin: bool) -> type[Any]:
    """Return the class that upstream's own runner would make of its tests, with forked workers."""

    class Parity(upstream.TestDistBackend, upstream.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            self._start_processes(multiprocessing.get_context("fork").Process)

        def run_test(self, test_name: str, parent_pipe: Any) -> None:
            with cpu.OnCpu():
                super().run_test(test_name, parent_pipe)

        def assertLogs(self, logger: Any = None, level: Any = None) -> Any:
            # The twin logs under its own package name.
            if is_twin and logger == "torch.distributed":
                logger = TWIN_LOGGER
            return super().assertLogs(logger, level)

        def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
            super()._check_return_codes(fn, elapsed_time)
            # Upstream checks worker 0 only. Here a crash of any worker is a failure.
            codes = [process.exitcode for process in self.processes]
            if any(codes):
                raise RuntimeError(f"the workers ended with exit codes {codes}")

    return Parity


def _run_alone(case: type[Any], test: str, limit_s: float) -> Result:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        process = multiprocessing.get_context("fork").Process(
            target=_run_case, args=(case, test, limit_s, Path(folder))
        )
        process.start()
        multiprocessing.connection.wait([process.sentinel], timeout=limit_s + GRACE_S)
        _end_group(process)
        seconds = time.monotonic() - start
        log = _read(Path(folder, "log"))
        written = _read(Path(folder, "result.json"))
    if not written:
        return Result(test, "failed", f"did not end within {limit_s:.0f} s, or crashed", seconds, log)
    outcome, reason = json.loads(written)
    return Result(test, outcome, reason, seconds, log)


def _run_case(case: type[Any], test: str, limit_s: float, folder: Path) -> None:
    """Run one test in its own process group, with its output in a log file."""
    os.setsid()
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["TMPDIR"] = str(folder)
    tempfile.tempdir = None
    harness: Any = importlib.import_module("torch.testing._internal.common_distributed")
    harness.TIMEOUT_DEFAULT = limit_s
    result = unittest.TestResult()
    case(test).run(result)
    part = folder / "result.part"
    part.write_text(json.dumps(_outcome(result)))
    part.replace(folder / "result.json")


def _outcome(result: unittest.TestResult) -> tuple[Outcome, str]:
    failures = result.errors + result.failures
    if failures:
        text = failures[0][1].strip()
        os.write(2, text.encode())
        return "failed", _last_error(text)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    return "passed", ""


def _last_error(text: str) -> str:
    """Return the line of a traceback with the first worker's error."""
    errors = [line.strip() for line in text.splitlines() if _names_an_error(line)]
    return (errors[-1] if errors else text.splitlines()[-1])[:200]


def _names_an_error(line: str) -> bool:
    head = line.split(":", 1)[0]
    return not line.startswith(" ") and (head.endswith(("Error", "Exception")) and " " not in head)


def _end_group(process: Any) -> None:
    """Kill the rest of the test's process group. Its leader is not reaped yet, so the id is not reused."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
