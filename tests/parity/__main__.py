"""`python -m tests.parity`: one line for each upstream test, and a closing count."""

from __future__ import annotations

import argparse
import os
import sys

TWIN = "laconic.algorithms"


def main(arguments: list[str] | None = None) -> int:
    """Run the tests; 0 if none failed, 1 if one did, 2 if there was nothing to run."""
    options = _parser().parse_args(arguments)
    # Workers are forked, and a pool of threads would not be; and 4 workers share the machine.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from tests.parity import driver

    try:
        prepared = driver.prepare(None if options.torch else options.twin)
    except ImportError as error:
        _say(f"--twin {options.twin}: it must have every module of the twin ({error}). --torch needs none.")
        return 2
    tests = [test for test in prepared.tests if options.filter in test]
    if not tests:
        _say(f"-k {options.filter}: no upstream test has this in its name. --list names them all.")
        return 2
    if options.list:
        _say("\n".join(tests))
        return 0
    results = []
    for result in prepared.run(tests, options.limit):
        results.append(result)
        reason = f"  ({result.reason})" if result.reason else ""
        _say(f"{result.verdict:8}{result.seconds:6.1f} s  {result.test}{reason}")
        if options.verbose and result.verdict == "failed":
            _say(result.log)
    count = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("passed", "failed", "skipped")}
    _say(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    return 1 if count["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("--torch", action="store_true", help="the control: torch's own modules")
    parser.add_argument("--twin", default=TWIN, help=f"the package to put in their place (default {TWIN})")
    parser.add_argument("-k", dest="filter", default="", metavar="FILTER", help="only tests with this in the name")
    parser.add_argument("--list", action="store_true", help="name the tests and run none")
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="for each test (default 240)")
    parser.add_argument("-v", "--verbose", action="store_true", help="show what a failed test printed")
    return parser


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
