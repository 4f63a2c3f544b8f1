"""The runs of `benchmarks/peers.py` as records, as tables and as a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from contestants.worker import Goal, Point

BUDGETS = (5e6, 20e6, 80e6)  # bytes of one worker: one step of DDP, then 4 and 16 times as many
COLOURS = {"baseline": "#8a8f98", "peer": "#d9822b", "ours": "#3b7dd8"}
SHOWN_ERROR = 120  # characters


@dataclass(frozen=True)
class Run:
    """One run: its points, what went wrong, and the seconds of the whole run with start-up."""

    link: str
    goal: Goal
    kind: str
    settings: str
    points: tuple[Point, ...]
    error: str
    wall_s: float

    @property
    def reached(self) -> bool:
        """Whether it came to the target loss."""
        return bool(self.points) and self.points[-1].ended == "loss"

    def loss_at(self, sent_bytes: float) -> str:
        """The validation loss when a worker had sent so many bytes at most; "reached" if the run had ended."""
        within = [point for point in self.points if point.sent_bytes <= sent_bytes]
        if not within:
            return "-"
        return "reached" if within[-1].ended == "loss" else f"{within[-1].loss:.2f}"


def read(file: Path) -> list[Run]:
    """The runs of a file."""
    found = json.loads(file.read_text())
    return [
        Run(**{**each, "goal": Goal(**each["goal"]), "points": tuple(Point(**point) for point in each["points"])})
        for each in found
    ]


def line(run: Run) -> str:
    """A run in one line, for the log."""
    last = run.points[-1] if run.points else Point(0, 0.0, float("nan"), 0.0)
    end = "reached" if run.reached else run.error or f"not reached in {last.ended}"
    return (
        f"{run.link:8} seed {run.goal.seed} {run.goal.name:34} step {last.step:4.0f} {last.seconds:6.1f} s "
        f"loss {last.loss:.3f} {last.sent_bytes / 1e6:7.2f} MB ({run.wall_s:.0f} s in all) {end}"
    )


def page(runs: list[Run], until_loss: float) -> str:
    """The table of all contestants, the one of losses at equal bytes, and what compares them, in Markdown."""
    names = list(dict.fromkeys(run.goal.name for run in runs))
    links = list(dict.fromkeys(run.link for run in runs))
    heads = "".join(f" {link}: seconds | steps | MB sent |" for link in links)
    rows = [f"| contestant |{heads} settings |", f"|---|{'---|---|---|' * len(links)}---|"]
    for name in names:
        cells = "".join(_cells([run for run in runs if run.goal.name == name and run.link == link]) for link in links)
        settings = next(run.settings for run in runs if run.goal.name == name)
        rows.append(f"| {_titled(name, runs)} |{cells} {settings} |")
    budgets = "".join(f" {size / 1e6:g} MB |" for size in BUDGETS)
    rows += ["", f"| loss after sending |{budgets}", f"|---|{'---|' * len(BUDGETS)}"]
    for name in names:
        first = next(run for run in runs if run.goal.name == name)
        if first.kind != "baseline" and first.points:
            rows.append(f"| {_titled(name, runs)} |" + "".join(f" {first.loss_at(size)} |" for size in BUDGETS))
    summary = (
        f"Until validation loss {until_loss:g}. All runs together: {sum(run.wall_s for run in runs) / 60:.0f} minutes."
    )
    return "\n".join([*rows, "", summary, ratios(runs)])


def _titled(name: str, runs: list[Run]) -> str:
    kind = next(run.kind for run in runs if run.goal.name == name)
    return f"**`{name}`**" if kind == "ours" else name


def _cells(runs: list[Run]) -> str:
    """Seconds, steps and bytes to the target, the mean over seeds; or what happened instead."""
    failed = [run for run in runs if not run.reached]
    if not runs:
        return " | | |"
    if failed:
        last = failed[0].points[-1] if failed[0].points else None
        what = failed[0].error[:SHOWN_ERROR].replace("|", "/") or "not reached"
        if last is None:
            return f" {what} | | |"
        return f" {what}: {last.loss:.2f} in {last.seconds:.0f} s | {last.step:.0f} | {last.sent_bytes / 1e6:.1f} |"
    lasts = [run.points[-1] for run in runs]
    seconds = [last.seconds for last in lasts]
    spread = f" ({min(seconds):.1f} to {max(seconds):.1f})" if len(seconds) > 1 else ""
    sent = fmean(last.sent_bytes for last in lasts) / 1e6
    return f" {fmean(seconds):.1f}{spread} | {fmean(last.step for last in lasts):.0f} | {sent:.1f} |"


def seconds_of(runs: list[Run]) -> dict[str, float]:
    """The mean seconds to the target by contestant, of those that reached it with every seed."""
    names = dict.fromkeys(run.goal.name for run in runs)
    of_name = {name: [run for run in runs if run.goal.name == name] for name in names}
    return {n: fmean(r.points[-1].seconds for r in rs) for n, rs in of_name.items() if all(r.reached for r in rs)}


def ratios(runs: list[Run]) -> str:
    """How much sooner the best plan of ours is than the best peer, than DDP and than `alone`, link by link."""
    lines = []
    for link in dict.fromkeys(run.link for run in runs):
        here = [run for run in runs if run.link == link]
        kinds = {run.goal.name: run.kind for run in here}
        seconds = seconds_of(here)
        ours = min((name for name in seconds if kinds[name] == "ours"), key=seconds.__getitem__, default=None)
        best = min((name for name in seconds if kinds[name] == "peer"), key=seconds.__getitem__, default=None)
        if ours is None:
            lines.append(f"{link}: none of our plans reached the target")
            continue
        beside = [name for name in (best, "torch DDP", "alone") if name in seconds]
        compared = [
            f"{seconds[name] / seconds[ours]:.2f} × sooner than {name} ({seconds[name]:.1f} s)" for name in beside
        ]
        lines.append(f"{link}: {ours} {seconds[ours]:.1f} s: {', '.join(dict.fromkeys(compared))}")
    return "\n".join(lines)


def _why_not(runs: list[Run], name: str, link: str) -> str:
    """Why there is no bar for a contestant on a link."""
    here = [run for run in runs if (run.goal.name, run.link) == (name, link)]
    if not here:
        return "not run"
    return "failed" if any(run.error for run in here) else "not reached"


def draw(runs: list[Run], until_loss: float, file: Path) -> None:
    """Draw the seconds to the target as bars, a panel for each link. What did not reach it has a mark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = list(dict.fromkeys(run.link for run in runs))
    kinds = {run.goal.name: run.kind for run in runs}
    first = seconds_of([run for run in runs if run.link == links[0]])
    names = sorted(kinds, key=lambda name: first.get(name, float("inf")), reverse=True)
    figure, panels = pyplot.subplots(1, len(links), sharey=True, figsize=(5 * len(links) + 2, 0.3 * len(names) + 1.4))
    for panel, link in zip([panels] if len(links) == 1 else panels, links, strict=True):
        seconds = seconds_of([run for run in runs if run.link == link])
        panel.barh(names, [seconds.get(n, 0) for n in names], color=[COLOURS[kinds[n]] for n in names])
        panel.set_xscale("log")
        low, high = min(seconds.values(), default=1) / 2, max(seconds.values(), default=1) * 2
        panel.set_xlim(low, high)
        ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high]
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.minorticks_off()
        for place, name in enumerate(names):
            text = f" {seconds[name]:.1f}" if name in seconds else f" {_why_not(runs, name, link)}"
            panel.text(seconds.get(name, low), place, text, va="center", fontsize=8)
        panel.set_title(link, fontsize=10)
        panel.set_xlabel(f"seconds until validation loss {until_loss:g}")
        panel.spines[["top", "right"]].set_visible(False)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in COLOURS]
    figure.legend(
        handles, ["no communication", "peers", "laconic"], ncols=3, loc="upper right", fontsize=8, frameon=False
    )
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(file, dpi=110)
