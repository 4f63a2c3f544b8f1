"""How many functions and files of laconic lie between a tensor and its first collective, under the plans people use.

    python -m tests.ways            # measures, and writes the table of docs/architecture.md

Counted are all functions of laconic from the call of the hook to that of torch's collective which carries the tensor:
headers and checks on the way count, too. What the caller's thread does after it has passed the exchange to the queue's
thread is not on the way. Comprehensions and lambdas are parts of the function that they stand in.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.exchange import AllToAll, Mean
from tests.workers import run_workers

HOME = Path(laconic.__file__).parent
PAGE = HOME.parent / "docs" / "architecture.md"
BEGIN, END = "<!-- measured by python -m tests.ways -->", "<!-- end of what was measured -->"

Functions = set[tuple[str, str]]


@dataclass(frozen=True)
class Way:
    """One training whose tensor is followed, and the file of the hook where its way begins."""

    plan: str
    wrapped: bool
    start: str

    @property
    def what(self) -> str:
        """The way in words."""
        return f"{'a gradient' if self.wrapped else 'a weight'} under `{self.plan}`{', DDP' * self.wrapped}"


WAYS = (
    Way("ddp()", True, "_average_bucket"),
    Way("power_sgd()", True, "_average_bucket"),
    Way("post_local_sgd(period=4)", False, "Session._after_step"),
    Way("streaming_diloco(period=4, delay=0)", False, "Session._after_step"),
)


class Recorder:
    """Notes the functions of laconic from the call of `start` to the collective that a codec requests."""

    def __init__(self, start: str) -> None:
        self.start = start
        self.armed = self.on = self.requested = self._handed_over = self._taken = False
        self.called: Functions = set()
        self._after_hand_over: Functions = set()
        """What the caller's thread called since it queued something: on the way only if it then queues more."""
        self._main = threading.get_ident()
        sys.setprofile(self)
        threading.setprofile(self)  # for the thread that launches collectives

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.armed or event not in ("call", "c_call", "c_return"):
            return
        name, file = frame.f_code.co_qualname, Path(frame.f_code.co_filename)
        main = threading.get_ident() == self._main
        if event == "c_call":
            if self.on and arg.__name__ == "put" and frame.f_code.co_name != "flush":
                self.called |= self._after_hand_over
                self._after_hand_over = set()
                self._handed_over = True
            return
        if event == "c_return":  # before it takes what was queued, the other thread may still end the last step
            self._taken |= self._handed_over and not main and arg.__name__ == "get"
            return
        self.on |= name == self.start
        if not self.on or not (main or self._taken):
            return
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Mean | AllToAll):
            self.requested = True
        if name in ("all_reduce", "all_to_all_single") and self.requested:  # that of a header comes before
            self.armed = self.on = False
        elif file.is_relative_to(HOME) and not frame.f_code.co_name.startswith("<"):
            late = self._handed_over and main
            (self._after_hand_over if late else self.called).add((str(file.relative_to(HOME)), name))


def follow(worker: int, way: Way) -> Functions:
    """Train a few steps, and follow a tensor in one of the last."""
    recorder = Recorder(way.start)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))
    model: nn.Module = DDP(module) if way.wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(way.plan), model, optimizer):
        for step in range(8):
            recorder.armed = step == 7  # threads run, DDP has rebuilt its buckets, and each plan synchronises
            generator = torch.Generator().manual_seed(1000 * step + worker)
            x, y = torch.randn(16, 256, generator=generator), torch.randint(3, (16,), generator=generator)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    sys.setprofile(None)
    assert not recorder.armed, "there was no collective"
    return recorder.called


def measure() -> dict[Way, Functions]:
    """Follow a tensor under each plan; the first worker's functions."""
    return {way: run_workers(follow, 2, (way,))[0] for way in WAYS}


def counts(called: Functions) -> tuple[int, int]:
    """Count functions and files."""
    return len(called), len({file for file, _ in called})


def table(measured: dict[Way, Functions]) -> str:
    """Format the counts as the table of the architecture page."""
    rows = [f"| {way.what} | {counts(called)[0]} | {counts(called)[1]} |" for way, called in measured.items()]
    head = ["| way to the first collective | functions | files |", "|---|---|---|"]
    return "\n".join([BEGIN, "", *head, *rows, "", END])


def on_page(text: str) -> dict[str, tuple[int, int]]:
    """Read the counts back from the page."""
    rows = [row for row in text[text.index(BEGIN) : text.index(END)].splitlines() if row.startswith("| a ")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {what: (int(functions), int(files)) for what, functions, files in cells}


if __name__ == "__main__":
    torch.set_num_threads(1)
    measured = measure()
    if "--show" in sys.argv:
        for way, called in measured.items():
            print(way.what, *sorted(called), sep="\n  ")  # noqa: T201
    page = PAGE.read_text()
    if BEGIN in page:
        PAGE.write_text(page[: page.index(BEGIN)] + table(measured) + page[page.index(END) + len(END) :])
    print(table(measured))  # noqa: T201
