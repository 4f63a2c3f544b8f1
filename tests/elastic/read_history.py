"""Check the history of an elastic run by the logs of its workers alone; nothing of laconic is imported.

    python -m tests.elastic.read_history logs/ --least 2 --repeat 5 --conserves

Each worker process has a file of JSON lines, in the order in which things happened to it:

    {"tried": [generation, step], "moves": [...], "state": [...], "shared": "..."}    a step begins
    {"commit": [since, step, workers], "state": [...], "shared": "..."}               it is committed

A `tried` line may have `"drew": [...], "of": size`: the samples of the step, and the size of the dataset. Each of these
draws has one fate: it was applied, by the commit of its step; or that try was undone, and the sample was applied later
(repeated), or not before the end of the log (lost).

`moves` is what the worker's own gradient does to the weights, `state` its weights, less its residuals, as they are once
all that is in flight has taken effect. Both are a few sums of many numbers. A `tried` line has a state where a
generation begins. `shared` is a digest of what all workers hold alike.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Sums = list[float]


@dataclass
class History:
    """What the logs say, and what is wrong with it."""

    commits: dict[int, tuple[int, tuple[str, ...]]] = field(default_factory=dict)
    """Of each committed step: the step that it continues, and the workers."""
    shared: dict[int, set[str]] = field(default_factory=dict)
    generations: dict[int, set[int]] = field(default_factory=dict)
    """The steps that were tried in each generation."""
    moved: dict[int, dict[str, tuple[Sums, Sums, Sums]]] = field(default_factory=dict)
    """Of each committed step and worker: its state before and after, and the sum of its moves."""
    repeated: int = 0
    """The most steps that had to be repeated when a generation began."""
    compared: int = 0
    """How many commits moved the mean state by the mean of all moves."""
    drawn: dict[tuple[str, int, int], list[int]] = field(default_factory=dict)
    """Of each worker, generation and step: the samples that were drawn."""
    made_in: dict[int, set[int]] = field(default_factory=dict)
    """Of each committed step: the generations in which workers that report it had tried it."""
    size: int = 0
    """The samples of the dataset; 0 if none were drawn."""
    applied: int = 0
    again: int = 0
    """How many draws were undone, and their samples applied later."""
    counted: set[tuple[str, int, int]] = field(default_factory=set)
    """The keys of `drawn` that were applied."""
    lost: int = 0
    """How many draws were undone, and their samples not applied any more."""
    wrong: list[str] = field(default_factory=list)


def check(folder: Path, *, least: int = 1, repeat: float = math.inf, conserves: bool = False) -> History:
    """Read all logs in a folder.

    Every commit continues the one before, was made once, and by at least `least` workers. At most `repeat` steps are
    repeated after a fault. With `conserves`, the plan loses nothing of a worker's steps, whatever its codec.
    """
    history = History()
    for path in sorted(folder.glob("*.jsonl")):
        _read(history, path.stem.split("-")[0], path.name, _lines(path))
    _check_chain(history, least)
    _check_repeats(history, repeat)
    if conserves:
        _check_moves(history)
    if history.drawn:
        _check_samples(history)
    return history


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line of a killed process
            found.append(json.loads(line))
    return found


def _read(history: History, id: str, name: str, lines: Sequence[dict[str, Any]]) -> None:
    """Add the log of one process."""
    states: dict[int, Sums] = {}
    moves: dict[int, Sums] = {}
    generation = last = 0
    for line in lines:
        if "tried" in line:
            now, step = line["tried"]
            if now < generation:
                history.wrong.append(f"{name}: generation {now} after {generation}")
            if now != generation:
                before = states.get(step - 1)
                if before not in (None, line["state"]) and now == generation + 1:
                    history.wrong.append(f"{name}: another state after step {step - 1} than it had committed")
                states, moves, generation = {step - 1: line["state"]}, {}, now
                history.shared.setdefault(step - 1, set()).add(line["shared"])
            history.generations.setdefault(now, set()).add(step)
            moves[step] = line["moves"]
            if "drew" in line:
                if history.drawn.setdefault((id, now, step), line["drew"]) is not line["drew"]:
                    history.wrong.append(f"{name}: step {step} drew twice in generation {now}")
                history.size = line["of"]
        elif "commit" in line:
            since, step, workers = line["commit"]
            if step <= last:
                history.wrong.append(f"{name}: commit {step} after {last}")
            if history.commits.setdefault(step, (since, tuple(workers))) != (since, tuple(workers)):
                history.wrong.append(f"{name}: another commit {step}: {since, workers} beside {history.commits[step]}")
            last = step
            history.shared.setdefault(step, set()).add(line["shared"])
            steps = range(since + 1, step + 1)
            if since in states and all(each in moves for each in steps):
                total = [math.fsum(column) for column in zip(*(moves[each] for each in steps), strict=True)]
                history.moved.setdefault(step, {})[id] = states[since], line["state"], total
            states[step] = line["state"]
            if step in moves:
                history.made_in.setdefault(step, set()).add(generation)


def _check_chain(history: History, least: int) -> None:
    end = 0
    for step in sorted(history.commits):
        since, workers = history.commits[step]
        if since != end:
            history.wrong.append(f"commit {step} continues step {since}, and step {end} was committed before it")
        if len(set(workers)) != len(workers) or len(workers) < least:
            history.wrong.append(f"commit {step} was made by {workers}")
        end = step
    for step, digests in sorted(history.shared.items()):
        if len(digests) > 1:
            history.wrong.append(f"after step {step} workers hold {len(digests)} different shared states")
        if step and step not in history.commits:
            history.wrong.append(f"a generation began after step {step}, which was not committed")


def _check_repeats(history: History, repeat: float) -> None:
    newest = 0
    for generation, steps in sorted(history.generations.items()):
        history.repeated = max(history.repeated, newest - min(steps) + 1)
        if newest - min(steps) + 1 > repeat:
            history.wrong.append(
                f"generation {generation} begins with step {min(steps)}; step {newest} was tried before"
            )
        newest = max(newest, *steps)


def _check_moves(history: History) -> None:
    """Compare how the mean state moved with the mean of the moves, where all workers of a commit have logged it."""
    for step, moved in sorted(history.moved.items()):
        if set(moved) != set(history.commits[step][1]):
            continue
        history.compared += 1
        for before, after, moves in zip(*(_mean(column) for column in zip(*moved.values(), strict=True)), strict=True):
            if abs(after - before - moves) > 1e-9 * max(1.0, abs(before), abs(after), abs(moves)):
                history.wrong.append(f"commit {step} moved by {after - before!r}, and its workers by {moves!r}")


def _check_samples(history: History) -> None:
    """Put the samples of all commits in a row: it must be one epoch after the other, each sample once in each."""
    applied = history.counted
    stream: list[int] = []
    position = {0: 0}
    for step, (since, workers) in sorted(history.commits.items()):
        tried = {now for id, now, which in history.drawn if which == step and id in workers}
        made_in = history.made_in.get(step) or {max(tried, default=0)}  # reported by processes that were started later
        if len(made_in) > 1:
            history.wrong.append(f"commit {step} was made in the generations {sorted(made_in)}")
        for key in [(id, max(made_in), each) for each in range(since + 1, step + 1) for id in workers]:
            if key not in history.drawn:
                history.wrong.append(f"commit {step}: worker {key[0]} drew no samples for step {key[2]}")
            applied.add(key)
            stream += history.drawn.get(key, [])
        position[step] = len(stream)
    for start in range(0, len(stream), history.size):
        epoch = stream[start : start + history.size]
        if len(set(epoch)) < len(epoch):
            history.wrong.append(f"epoch {start // history.size} has a sample twice")
    last = {sample: place for place, sample in enumerate(stream)}
    for key, samples in history.drawn.items():
        if key in applied:
            history.applied += len(samples)
            continue
        began = position.get(min(history.generations[key[1]]) - 1, 0)
        repeated = sum(last.get(sample, -1) >= began for sample in samples)
        history.again += repeated
        history.lost += len(samples) - repeated


def _mean(rows: Sequence[Sums]) -> Sums:
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def samples(history: History) -> str:
    """Return the fates of all draws as text."""
    drawn = sum(map(len, history.drawn.values()))
    fates = f"{history.applied} applied, {history.again} repeated, {history.lost} lost"
    return f"{drawn} samples drawn: {fates}; {history.applied / (history.size or 1):.1f} epochs of {history.size}"


def main() -> None:
    """Print what the logs say; exit with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Check the history of an elastic run by its logs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--least", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=sys.maxsize)
    parser.add_argument("--conserves", action="store_true")
    given = parser.parse_args()
    found = check(given.folder, least=given.least, repeat=given.repeat, conserves=given.conserves)
    sys.stdout.write(
        f"{len(found.commits)} commits up to step {max(found.commits, default=0)}, {len(found.generations)} "
        f"generations, {found.repeated} steps repeated at most, {found.compared} commits compared with their moves\n"
        f"{samples(found)}\n"
    )
    sys.stdout.writelines(f"{line}\n" for line in found.wrong[:50])
    sys.exit(bool(found.wrong))


if __name__ == "__main__":
    main()
