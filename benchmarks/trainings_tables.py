"""The tables of docs/quality.md and README that come from the suite of trainings, made from `quality.json`.

    python benchmarks/trainings_tables.py           # print them, and write them into the pages
    python benchmarks/trainings_tables.py --cells   # what each training left out keeps, and what was predicted of it

No training is run: `trainings.py` does that. Tests compare the pages with the file.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

import laconic
from laconic import Plan, frugal
from laconic.cost import facts_of
from laconic.tools.planner import quality

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "quality.md", ROOT / "README.md"
END = "<!-- end of what was measured -->"
WORKERS = 4
FACTORS = ("30x", "60x", "120x")
NEAR = 0.05
"""Differences of so much between two runs mean nothing."""
ROWS = (
    *("quantized_ddp()", 'frugal("30x")', 'frugal("60x")', 'frugal("120x")'),
    *("power_sgd(rank=32)", "power_sgd(rank=16)", "power_sgd(rank=8)", "power_sgd(rank=4)"),
    *(
        "diloco(period=4)",
        "diloco()",
        "diloco(lr=0.7, momentum=0.9)",
        "diloco(period=100, lr=0.7, momentum=0.9)",
        "streaming_diloco()",
        "sparse_loco()",
    ),
    *("post_local_sgd()", "demo()", "demo(fraction=0.014)"),
)


AVERAGED = (
    "ddp()",
    "streaming_diloco(period=4, fragments=4, delay=0)",
    "streaming_diloco(period=8, fragments=4, delay=0)",
    "diloco()",
)
"""Plans whose workers step by themselves, beside the one whose workers do not."""


@dataclass(frozen=True)
class Measured:
    """What a plan kept of a training, by seed, and how many times fewer bytes it sent."""

    plan: str
    fewer: float
    kept: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The mean over seeds."""
        return fmean(self.kept.values())


def measured(training: Mapping[str, Any], plan: Plan) -> Measured | None:
    """Return what a plan kept of a training; None if it was not measured."""
    plan = resolved(training, plan)
    for text, cell in training["plans"].items():
        if laconic.plan(text) == plan:
            return Measured(text, cell["fewer"], cell["kept"])
    return None


def resolved(training: Mapping[str, Any], plan: Plan) -> Plan:
    """Return what a plan becomes on the model of a training."""
    return plan.resolved(facts_of(training["shapes"], WORKERS, training["buffers"], training["optimizers"]))


# What plans keep.


def suite() -> str:
    """A row for each plan, a column for each training."""
    trainings = quality.record()
    rows = []
    for text in ROWS:
        cells = [measured(training, laconic.plan(text)) for training in trainings.values()]
        rows.append([f"`{text}`", *("" if cell is None else _shown(cell) for cell in cells)])
    return _table(["plan", *trainings], rows)


COLUMNS = {
    "prose": "small transformer, AdamW",
    "batches": "large batches",
    "wide": "three times as wide",
    "muon": "Muon",
    "lstm": "LSTM, SGD",
    "cnn": "ConvNet, SGD",
    "lora": "LoRA, AdamW",
}
"""The columns of README's table."""
SHORT = ("quantized_ddp()", "power_sgd(rank=32)", "power_sgd(rank=8)", 'frugal("30x")', 'frugal("60x")', "diloco()")
"""Its rows."""


def short() -> str:
    """What plans keep by kind of training, in the mean over seeds: README's table."""
    rows = []
    for text in SHORT:
        cells = [measured(quality.record()[name], laconic.plan(text)) for name in COLUMNS]
        shown = ("" if cell is None else f"{100 * cell.mean:.0f} %, {cell.fewer:.0f} ×" for cell in cells)
        rows.append([f"`{text}`", *shown])
    return _table(["", *COLUMNS.values()], rows)


def kinds() -> str:
    """What the trainings are."""
    rows = [
        [
            name,
            training["about"],
            f"{facts['width']:.0f}",
            f"{facts['steps']}",
            "" if facts["noise"] is None else f"{facts['noise']:.3g}",
        ]
        for name, training in quality.record().items()
        for facts in [training["training"]]
    ]
    return _table(["training", "", "width", "steps", "noise"], rows)


def _shown(cell: Measured) -> str:
    return f"{', '.join(f'{100 * each:.0f}' for each in cell.kept.values())} ({cell.fewer:.0f} ×)"


def by_rate(plans: Sequence[str], rates: Sequence[float]) -> str:
    """What plans keep at other learning rates, in factors of the one of `ddp()`."""
    rows = []
    for name, training in quality.record().items():
        for text in plans:
            plan = laconic.plan(text)
            cells: dict[float, Mapping[str, float]] = {}
            for rate in rates:
                tried = training["plans"] if rate == 1 else training["rates"].get(f"{rate:g}", {})
                for each, cell in tried.items():
                    if laconic.plan(each) == plan:
                        cells[rate] = cell["kept"]
            if not cells or set(cells) == {1.0}:
                continue
            kept = (f"{100 * fmean(cells[rate].values()):.0f}" if rate in cells else "" for rate in rates)
            rows.append(
                [
                    name,
                    f"`{text}`",
                    *("100" if text == "ddp()" and rate == 1 else each for rate, each in zip(rates, kept, strict=True)),
                ]
            )
    return _table(["training", "plan", *(f"rate × {rate:g}" for rate in rates)], rows)


# The rule of `frugal`.


@dataclass(frozen=True)
class Choice:
    """What `frugal` of a factor became on a training, and the named plan that kept most at as many or fewer bytes."""

    training: str
    factor: str
    became: Plan
    own: Measured | None
    best: Measured

    @property
    def behind(self) -> float | None:
        """How much less `frugal` keeps, of the seeds of both. Kept counts as 100 % at most."""
        if self.own is None or not (seeds := self.own.kept.keys() & self.best.kept.keys()):
            return None
        return fmean(min(1.0, self.best.kept[seed]) - min(1.0, self.own.kept[seed]) for seed in seeds)


def choices() -> Iterator[Choice]:
    """Compare `frugal` with all named plans that were measured. `demo()` needs an optimizer of its own."""
    for name, training in quality.record().items():
        for factor in FACTORS:
            became = resolved(training, frugal(factor))
            own = measured(training, became)
            others = [
                Measured(text, cell["fewer"], cell["kept"])
                for text, cell in training["plans"].items()
                if not text.startswith(("Plan(", "demo(")) and cell["fewer"] >= 0.99 * float(factor[:-1])
            ]
            known = [each for each in others if own is None or own.kept.keys() & each.kept.keys()]
            seeds = set[str]() if own is None else set(own.kept)
            best = max(known, key=lambda each: fmean(kept for s, kept in each.kept.items() if not seeds or s in seeds))
            yield Choice(name, factor, became, own, best)


def rule() -> str:
    """A row for each training, and three columns for each factor."""
    rows = defaultdict[str, list[str]](list)
    for each in choices():
        kept = "not measured" if each.own is None else _shown(each.own)
        better = each.behind is not None and each.behind > 0
        rows[each.training] += [
            f"`{_short(each.became)}`",
            kept,
            f"`{each.best.plan}` {_shown(each.best)}" if better else "",
        ]
    head = [part for factor in FACTORS for part in (f'`frugal("{factor}")` is', "kept", "more")]
    return _table(["training", *head], [[name, *row] for name, row in rows.items()])


def _short(plan: Plan) -> str:
    return repr(plan).replace(", bits=4", "")


# Predictions.


@dataclass(frozen=True)
class LeftOut:
    """What a plan kept of a training, and what was predicted from all other trainings."""

    cell: quality.Cell
    family: str
    kept: float
    """100 % at most: nothing is predicted to keep more."""
    predicted: quality.Kept


def left_out() -> Iterator[LeftOut]:
    """Predict the cells of each training from the others."""
    cells = quality.measured_cells()
    for each in cells:
        # "prose, 1000 steps" is of the same training as "prose"
        others = [other for other in cells if other.name.split(",")[0] != each.name.split(",")[0]]
        plan = laconic.plan(each.plan)
        family, found = quality.family_of(plan, each.training.width), quality.predict(plan, each.training, others)
        if family is not None and found is not None:
            yield LeftOut(each, family[0], min(1.0, each.kept), found)


def left_out_table() -> str:
    """How well the cells of a training are predicted from the other trainings."""
    cells = list(left_out())
    families = sorted({each.family for each in cells})
    groups = [(name, [each for each in cells if each.family == name]) for name in families] + [("all", cells)]
    rows = []
    for name, some in groups:
        near = sum(abs(each.predicted.value - each.kept) <= 0.15 for each in some)
        inside = sum(each.predicted.low <= each.kept <= each.predicted.high for each in some)
        wide = fmean(each.predicted.high - each.predicted.low for each in some)
        rows.append(
            [name, f"{len(some)}", *(f"{n} ({n / len(some):.0%})" for n in (near, inside)), f"{100 * wide:.0f} points"]
        )
    return _table(["family", "cells", "within 15 points", "inside the interval", "mean width of the interval"], rows)


def left_out_cells() -> str:
    """Each cell that was predicted from the other trainings."""
    rows = [
        [
            each.cell.name,
            f"`{each.cell.plan}`",
            f"{each.cell.kept:.0%}",
            f"{each.predicted.value:.0%}",
            f"{each.predicted.low:.0%} to {each.predicted.high:.0%}",
        ]
        for each in left_out()
    ]
    return _table(["training", "plan", "kept", "predicted", "interval"], rows)


FEATURES = ("twice the rank or period", "twice the width", "twice the steps", "SGD", "twice the noise")


def law() -> str:
    """By how much what is lost (and 0.1) changes, for each family."""
    cells = quality.measured_cells()
    rows = []
    for name in ("few bits", "low rank", "deltas", "sparse deltas"):
        found = quality.fit(name, cells, noisy=True)
        if found is not None:
            weights = found.weights.tolist()[1:]
            rows.append([name, *(f"× {math.exp(each):.2f}" for each in weights)])
    return _table(["family", *FEATURES], rows)


PLACES = ((64, 300), (128, 300), (128, 3000), (384, 300), (384, 3000))


def predicted() -> str:
    """What low ranks and deltas keep under Adam, by width and steps."""
    rows = []
    for text in (*(f"power_sgd(rank={rank})" for rank in (32, 16, 8, 4)), *(f"diloco(period={n})" for n in (4, 8, 16))):
        found = [quality.predict(laconic.plan(text), quality.TrainingFacts(*place)) for place in PLACES]
        shown = (
            "" if k is None else f"{round(100 * k.value)} ({round(100 * k.low)} to {round(100 * k.high)})"
            for k in found
        )
        rows.append([f"`{text}`", *shown])
    return _table(["plan", *(f"width {width}, {steps} steps" for width, steps in PLACES)], rows)


# The page.

TABLES: dict[str, Callable[[], str]] = {
    "trainings": kinds,
    "suite": suite,
    "rates": partial(by_rate, ["demo()"], (0.25, 0.5, 1, 2, 4)),
    "rates of weights": partial(by_rate, AVERAGED, (1, 1.25, 1.5, 2, 3)),
    "frugal": rule,
    "law": law,
    "predicted": predicted,
    "left out": left_out_table,
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)


def begin(name: str) -> str:
    """The mark above a table."""
    return f"<!-- measured: {name} (python benchmarks/trainings_tables.py) -->"


def on_page(page: str, name: str) -> str:
    """Return a table as it is on the page."""
    return page.partition(begin(name))[2].partition(END)[0].strip()


def write(path: Path, tables: Mapping[str, Callable[[], str]]) -> None:
    """Print tables, and write them into a page."""
    page = path.read_text()
    for name, make in tables.items():
        table = make()
        print(f"{name}\n\n{table}\n")
        if begin(name) in page:
            head, _, rest = page.partition(begin(name))
            page = f"{head}{begin(name)}\n\n{table}\n\n{END}{rest.partition(END)[2]}"
    path.write_text(page)


def main() -> None:
    """Print the tables, and write them into the pages."""
    if "--cells" in sys.argv:
        print(left_out_cells())
        return
    write(PAGE, TABLES)
    write(README, {"kept": short})


if __name__ == "__main__":
    main()
