"""The quick part of every benchmark, and how its ratios are read from the file that it writes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Ratios = dict[str, float]


@dataclass(frozen=True)
class Benchmark:
    """A benchmark with small arguments; it writes `--json`."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    band: float = 0.25
    """How far two ratios of the same code are apart at most, on a shared machine with 2 cores."""
    read: Callable[[str], Ratios] = json.loads
    """Turns the file into ratios; by default it has nothing else."""
    root: bool = False
    """Whether it needs root, for network namespaces."""

    def hindrance(self) -> str:
        """Return why it cannot run here; empty if it can."""
        return "needs root, for network namespaces" if self.root and os.geteuid() else ""


def averaging(text: str) -> Ratios:
    """Beside a bare all-reduce."""
    rows = json.loads(text)
    return {
        f"{row['workers']} workers, {row['contestant']}": row["ratio"]
        for row in rows
        if row["contestant"].startswith("laconic")
    }


def codecs(text: str) -> Ratios:
    """Beside torch's quantization_pertensor_hook."""
    return {
        f"{row['model']}, {row['codec']}": row["ratio"]
        for row in json.loads(text)
        if not row["codec"].startswith("torch")
    }


def powersgd(text: str) -> Ratios:
    """Beside torch's hook of the same rank, with whichever way of batching is faster."""
    rows = {(row["model"], row["hook"]): row["ms"] for row in json.loads(text)}
    found = {}
    for (model, hook), ms in rows.items():
        if hook.startswith("laconic"):
            rank = hook.split()[1]
            theirs = [spent for (of, name), spent in rows.items() if of == model and name.startswith(f"torch {rank} ")]
            found[f"{model}, {hook}"] = ms / min(theirs)
    return found


def frontier(text: str) -> Ratios:
    """The loss of each plan beside that of ddp()."""
    runs = [json.loads(line) for line in text.splitlines()]
    losses: dict[str, float] = {run["plan"]: run["loss"] for run in runs}
    return {
        f"loss of {plan}": loss / losses["ddp()"] for plan, loss in losses.items() if plan not in ("ddp()", "alone()")
    }


def peers(text: str) -> Ratios:
    """Seconds to the target of the best plan, beside the best peer and `alone`."""
    seconds: dict[str, list[float]] = {}
    for run in json.loads(text):
        if run["points"] and run["points"][-1]["ended"] == "loss":
            kind = "alone" if run["goal"]["name"] == "alone" else run["kind"]
            seconds.setdefault(kind, []).append(run["points"][-1]["seconds"])
    ours: Any = min(seconds.pop("ours"))
    return {f"beside the best of kind {kind!r}": ours / min(spent) for kind, spent in seconds.items()}


QUICK = [
    Benchmark(
        "powersgd", ("--device", "cpu", "--models", "ResNet-50", "--ranks", "4", "--times", "2"), 200, read=powersgd
    ),
    Benchmark("codecs", ("--device", "cpu", "--seconds", "3"), 90, read=codecs),
    Benchmark("averaging", ("--workers", "2", "--seconds", "15"), 90, read=averaging),
    Benchmark("silence", (), 60),
    Benchmark("step_cost", ("--models", "0.1M"), 120, band=0.5),
    Benchmark("guards", ("--steps", "320"), 120),
    Benchmark("faults", ("--workers", "2", "--times", "5", "--mismatches"), 60, band=0.5),
    Benchmark("scale", ("--workers", "16"), 90, band=0.5),
    Benchmark("checkpoints", ("--gb", "0.5", "--times", "4"), 90, band=0.5),
    Benchmark("frontier", ("--steps", "60", "--seeds", "0", "--plans", "frugal('60x')"), 120, band=0.05, read=frontier),
    Benchmark("peers", ("--quick",), 150, band=0.5, read=peers, root=True),
]

SKIPPED = {
    "trainings_tables": "writes tables of what trainings.py has measured",
    "memory": "measures bytes of our own plans, with no peer",
    "choices": "reads what trainings.py has measured, and has no peer",
    "unequal_speeds": "takes 40 seconds for each of nine rows, and compares plans of our own",
    "trainings": "takes ten minutes at its quickest, and writes losses, not ratios",
    "gpt_step": "needs a GPU",
    "tiles": "needs a GPU and Triton",
    "prediction": "needs root and 15 minutes",
    "ray_traffic": "needs root and Ray",
    "buffers": "compares losses of our own settings, with no peer",
}
"""Benchmarks that have no quick part on a CPU."""
