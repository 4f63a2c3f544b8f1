"""`python -m tests.parity`: print one line for each upstream test, and the counts."""

from __future__ import annotations

import argparse
import os
import sys

TWIN = "laconic.algorithms"


def main(arguments: list[str] | None = None) -> int:
    """Run the tests. Return 0 if none failed, 1 if one failed, 2 if there was nothing to run."""
    options = _parser().parse_args(arguments)
    # Workers are forked, which does not copy a thread pool, and 4 workers share the machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.parity import driver

    try:
        prepared = driver.prepare(None if options.torch else options.twin)
    except ImportError as error:
        _print(f"--twin {options.twin}: it must have every module of the twin ({error}). --torch needs no package.")
        return 2
    tests = [test for test in prepared.tests if any(part in test for part in options.filters or [""])]
    if not tests:
        _print(f"-k {' -k '.join(options.filters)}: no upstream test has this in its name. --list shows all names.")
        return 2
    if options.list:
        _print("\n".join(tests))
        return 0
    results = []
    for result in prepared.run(tests, options.limit):
        results.append(result)
        reason = f"  ({result.reason})" if result.reason else ""
        _print(f"{result.outcome:8}{result.seconds:6.1f} s  {result.test}{reason}")
        if options.verbose and result.outcome == "failed":
            _print(result.log)
    count = {outcome: sum(r.outcome == outcome for r in results) for outcome in ("passed", "failed", "skipped")}
    _print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--torch", action="store_true", help="run torch's own modules, as the control")
    parser.add_argument("--twin", default=TWIN, help=f"the package to test (default {TWIN})")
    parser.add_argument("-k", dest="filters", action="append", metavar="PART", help="only tests with this in the name")
    parser.add_argument("--list", action="store_true", help="print the names and run no test")
    parser.add_argument(
        "--limit", type=float, default=240.0, metavar="SECONDS", help="time limit of each test (default 240)"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="print the output of failed tests")
    return parser


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
