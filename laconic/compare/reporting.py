"""What a run tells whoever started it: how far it is, what it has sent, and, back, when it is enough.

Enough is a number of steps, of seconds, or a loss to reach. The loss is the training loss, averaged over the last
eight reports and over all workers; every fourth report the workers compare notes, so they all stop at the same one.
They do that over a group of their own, apart from the training's traffic, its bytes and its ledger.
"""

from __future__ import annotations

import array
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import torch
import torch.distributed as dist

from laconic.compare.links import Link, collective_s, framing_bytes
from laconic.ledger import Ledger

CARD, CONTROL_CARD = "LACONIC_CARD", "LACONIC_CONTROL_CARD"
SMOOTHED = 8  # reports in the mean that is compared with the target
CHECKED_EVERY = 4  # reports; in between, workers do not wait for each other

Ending = Literal["", "steps", "seconds", "loss"]


@dataclass(frozen=True)
class Goal:
    """When a run has done enough: whichever comes first. None does not end it."""

    steps: int | None = None
    seconds: float | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Progress:
    """Where one worker stands after a step; all numbers are its own.

    `steps` and `seconds_limit` are where it ends at the latest, 0 if nobody said. `seconds` may be computed in part
    (`Watch`); `talking_s` is the part of it during which something was on its way, and `link_s` what of it is computed.
    `level_bytes` are the `wire_bytes` of each level. `ended` says what ended the run.

    >>> now = Progress(worker=0, step=50, steps=200, loss=2.5, tokens_per_s=1e4, sent_bytes=8, seconds=10.0)
    >>> now.seconds_left
    30.0
    """

    worker: int
    step: int
    steps: int
    loss: float
    tokens_per_s: float
    sent_bytes: int
    seconds: float
    wire_bytes: int = 0
    framing_bytes: int = 0
    card_bytes: int | None = None
    talking_s: float = 0.0
    link_s: float = 0.0
    level_bytes: dict[str, int] = field(default_factory=dict)
    seconds_limit: float = 0.0
    ended: Ending = ""

    @property
    def seconds_left(self) -> float:
        """How long the rest takes at the pace so far; 0 if nobody said where it ends."""
        if self.ended:
            return 0.0
        left = [self.seconds / self.step * (self.steps - self.step)] if self.steps else []
        left += [self.seconds_limit - self.seconds] if self.seconds_limit else []
        return max(0.0, min(left, default=0.0))


class Watch(Ledger):
    """A ledger that also keeps the time: while something was on its way, and what a given link would take for it.

    It also counts what gloo and TCP add to the bytes.

    With `seconds`, an unbuffered file, the seconds of each collective go there as doubles. Collectives come in the
    same order on every worker, so the files of all workers, side by side, tell who waited for whom.
    """

    def __init__(self, computed: Link | None = None, seconds: IO[bytes] | None = None) -> None:
        super().__init__()
        self.busy_s = 0.0
        self.link_s = 0.0
        self.framing_bytes = 0
        self._computed = computed
        self._seconds = seconds
        self._busy_until = 0.0
        self._watching = threading.Lock()

    def record(
        self,
        op: str,
        payload_bytes: int,
        workers: int,
        *,
        phase: str,
        level: str = "world",
        round_: int = 1,
        seconds: float = 0.0,
        step: int | None = None,
    ) -> None:
        """Write down one collective that has just ended."""
        super().record(op, payload_bytes, workers, phase=phase, level=level, round_=round_, seconds=seconds, step=step)
        now = time.perf_counter()
        with self._watching:
            self.busy_s += max(0.0, now - max(now - seconds, self._busy_until))
            self._busy_until = now
            self.framing_bytes += framing_bytes(op, payload_bytes, workers)
            if self._computed is not None:
                self.link_s += collective_s(op, payload_bytes, workers, self._computed.inside(workers))
            if self._seconds is not None and level == "world":  # compared one by one with those of the other workers
                self._seconds.write(array.array("d", [seconds]).tobytes())


class Reporting:
    """One worker's side of a run: its clock starts here, and `step` says whether it is enough."""

    def __init__(
        self,
        show: Callable[[Progress], None],
        ledger: Ledger,
        goal: Goal,
        control: dist.ProcessGroup | None,
    ) -> None:
        self._show = show
        self._ledger = ledger
        self._goal = goal
        self._control = control
        self._worker = dist.get_rank() if dist.is_initialized() else 0
        self._recent: deque[float] = deque(maxlen=SMOOTHED)
        self._reports = 0
        self._tokens = 0
        if control is not None:
            dist.barrier(control)
        self._card_before = card_bytes()
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far, with those that the link would have taken where they are computed."""
        measured = time.perf_counter() - self._began
        return measured + (self._ledger.link_s if isinstance(self._ledger, Watch) else 0.0)

    def step(self, step: int, loss: float, tokens: int) -> Progress:
        """Tells of one more step, and returns what it told: `ended` says whether it is the last."""
        self._recent.append(loss)
        self._reports += 1
        self._tokens += tokens
        seconds = self.seconds
        ended = self._ended(step, seconds)
        ledger = self._ledger
        busy_s, link_s = (ledger.busy_s, ledger.link_s) if isinstance(ledger, Watch) else (ledger.seconds, 0.0)
        card = card_bytes()
        told = Progress(
            worker=self._worker,
            step=step,
            steps=self._goal.steps or 0,
            loss=loss,
            tokens_per_s=self._tokens / seconds,
            sent_bytes=ledger.payload_bytes,
            seconds=seconds,
            wire_bytes=ledger.wire_bytes,
            framing_bytes=ledger.framing_bytes if isinstance(ledger, Watch) else 0,
            card_bytes=None if card is None or self._card_before is None else card - self._card_before,
            talking_s=min(busy_s + link_s, seconds),
            link_s=link_s,
            level_bytes={name: total.wire_bytes for name, total in ledger.totals(by="level").items()},
            seconds_limit=self._goal.seconds or 0.0,
            ended=ended,
        )
        self._show(told)
        return told

    def _ended(self, step: int, seconds: float) -> Ending:
        """The same on every worker: the steps are, and the rest is agreed on."""
        goal = self._goal
        last = goal.steps is not None and step >= goal.steps
        if (goal.seconds is not None or goal.loss is not None) and (last or self._reports % CHECKED_EVERY == 0):
            loss, seconds = self._agreed(sum(self._recent) / len(self._recent), seconds)
            if goal.loss is not None and loss <= goal.loss:
                return "loss"
            if goal.seconds is not None and seconds >= goal.seconds:
                return "seconds"
        return "steps" if last else ""

    def _agreed(self, *values: float) -> tuple[float, ...]:
        """Each value's mean over the workers, exactly the same on all of them."""
        if self._control is None:
            return values
        means = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(means, group=self._control)
        return tuple((means / self._control.size()).tolist())


def control_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """A group of the same workers for agreeing on when to stop, over its own network card where there is one."""
    if group is None or group.size() == 1:
        return None
    card = os.environ.get("GLOO_SOCKET_IFNAME")
    if CONTROL_CARD in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ[CONTROL_CARD]
    try:
        ranks = dist.get_process_group_ranks(group)
        made: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        dist.barrier(made)
    finally:
        if card is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = card
    return made


def card_bytes() -> int | None:
    """What the network card under study has sent since it was made, or None if there is no such card."""
    if CARD not in os.environ:
        return None
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == os.environ[CARD]:
            return int(numbers.split()[8])
    return None
