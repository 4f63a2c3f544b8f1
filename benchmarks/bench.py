"""Run the quick part of every benchmark, compare its ratios with the recorded ones, and say what got slower.

    make bench                                            # or python benchmarks/bench.py
    python benchmarks/bench.py --only averaging scale     # some of them
    python benchmarks/bench.py --record                   # write recorded.json and the table in docs/benchmarks.md

A ratio is a time, or a loss, beside that of a named peer in the same run: lower is better, and another machine gives
about the same. It counts as slower if it is above the recorded one by more than the band of its benchmark, which is the
noise of a shared machine with 2 cores. The exit status is 1 if something got slower, failed, or is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from quick import QUICK, SKIPPED, Benchmark
from ratios import machine

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
PAGE = HERE.parent / "docs" / "benchmarks.md"
BEGIN, END = "<!-- recorded: benchmarks/bench.py --record writes this -->\n", "<!-- end of recorded -->\n"

Change: TypeAlias = Literal["as recorded", "slower", "faster", "missing", "new"]


@dataclass(frozen=True)
class Row:
    """One ratio beside the recorded one; None where there is none."""

    name: str
    recorded: float | None
    now: float | None
    change: Change


def compare(recorded: Mapping[str, float], now: Mapping[str, float], bands: Mapping[str, float]) -> list[Row]:
    """Say of each ratio what became of it. Names begin with that of a benchmark and a colon, and `bands` has that.

    >>> compare({"a: x": 1.0, "a: y": 1.0}, {"a: x": 1.3, "a: z": 2.0}, {"a": 0.25})
    ... # doctest: +NORMALIZE_WHITESPACE
    [Row(name='a: x', recorded=1.0, now=1.3, change='slower'),
     Row(name='a: y', recorded=1.0, now=None, change='missing'),
     Row(name='a: z', recorded=None, now=2.0, change='new')]
    """
    rows = []
    for name in dict.fromkeys((*recorded, *now)):
        before, after = recorded.get(name), now.get(name)
        rows.append(Row(name, before, after, _change(before, after, bands[name.partition(":")[0]])))
    return rows


def _change(before: float | None, after: float | None, band: float) -> Change:
    if before is None:
        return "new"
    if after is None:
        return "missing"
    if after > before * (1 + band):
        return "slower"
    return "faster" if after < before / (1 + band) else "as recorded"


def measured(benchmark: Benchmark) -> dict[str, float] | str:
    """Run one benchmark, and return its ratios, or why there are none."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ratios.json")
        command = [sys.executable, str(HERE / f"{benchmark.name}.py"), *benchmark.arguments, "--json", str(file)]
        # A session of its own: its workers end with it.
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as run:
            try:
                output, _ = run.communicate(timeout=benchmark.limit_s)
            except subprocess.TimeoutExpired:
                return f"it took longer than {benchmark.limit_s:g} s"
            finally:
                end(run)
        if run.returncode or not file.exists():
            return f"exit status {run.returncode}\n{output[-2000:]}"
        found = benchmark.read(file.read_text())
        return {f"{benchmark.name}: {name}": round(ratio, 3) for name, ratio in found.items()}


def end(run: subprocess.Popen[str]) -> None:
    """End a run and whatever it has left; first in a way that lets it clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.wait(timeout=20)


def run_all(benchmarks: Sequence[Benchmark]) -> tuple[dict[str, float], bool]:
    """Run benchmarks one after the other; return all ratios, and whether every one that could run did."""
    ratios: dict[str, float] = {}
    good = True
    for each in benchmarks:
        start = time.monotonic()
        found = measured(each)
        spent = f"{each.name}: {time.monotonic() - start:.0f} s"
        if isinstance(found, str):
            print(f"{spent}, failed: {found}", flush=True)
            good = False
        else:
            print(f"{spent}, {len(found)} ratios", flush=True)
            ratios |= found
    return ratios, good


def show(rows: Sequence[Row], bands: Mapping[str, float]) -> None:
    width = max(len(row.name) for row in rows)
    print(f"\n{'ratio to a peer, lower is better':<{width}} {'recorded':>9} {'now':>7}  change")
    for row in rows:
        before, after = ("-" if value is None else f"{value:.2f}" for value in (row.recorded, row.now))
        band = f" (noise: {bands[row.name.partition(':')[0]]:.0%})" if row.change in ("slower", "faster") else ""
        print(f"{row.name:<{width}} {before:>9} {after:>7}  {row.change}{band}")


def record(ratios: Mapping[str, float]) -> None:
    """Write recorded.json, and the table of the page."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    RECORDED.write_text(json.dumps({"machine": machine(), "date": date, "ratios": ratios}, indent=1) + "\n")
    page = PAGE.read_text()
    before, found, rest = page.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{PAGE} has no block between {BEGIN.strip()} and {END.strip()}: put both there.")
    lines = [f"{machine()}; {date}.\n", "| benchmark | ratio |", "|---|---|"]
    lines += [f"| {name.replace('|', ' ')} | {ratio:.2f} |" for name, ratio in ratios.items()]
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[each.name for each in QUICK])
    parser.add_argument("--record", action="store_true", help="write the ratios down instead of judging them")
    options = parser.parse_args()
    chosen = [each for each in QUICK if options.only is None or each.name in options.only]
    able = [each for each in chosen if not (why := each.hindrance()) or print(f"{each.name}: skipped, it {why}")]
    if options.only is None:
        for name, why in SKIPPED.items():
            print(f"{name}: skipped, it {why}")
    known = json.loads(RECORDED.read_text())["ratios"] if RECORDED.exists() else {}
    ratios, good = run_all(able)
    if options.record:
        names = {each.name for each in able}
        kept = {name: ratio for name, ratio in known.items() if name.partition(":")[0] not in names}
        record(dict(sorted((kept | ratios).items())))
        print(f"recorded {len(ratios)} ratios")
        raise SystemExit(not good)
    bands = {each.name: each.band for each in QUICK}
    mine = {name: ratio for name, ratio in known.items() if name.partition(":")[0] in {each.name for each in able}}
    rows = compare(mine, ratios, bands)
    show(rows, bands)
    slower = [row.name for row in rows if row.change in ("slower", "missing")]
    print(f"\n{len(slower)} slower or missing: {'; '.join(slower)}" if slower else "\nnothing got slower")
    raise SystemExit(bool(slower) or not good)


if __name__ == "__main__":
    main()
