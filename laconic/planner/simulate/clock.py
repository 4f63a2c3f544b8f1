"""The virtual clock of a simulated training: each worker's own time, which collectives bring together."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.comm.in_process import Collective, Members
from laconic.planner.simulate.timing import Timing
from laconic.plans.schedules import Payload

BACKWARD_SHARE = 2 / 3
"""The share of a step that the backward pass takes: it computes two products where the forward pass computes one."""


@dataclass(frozen=True)
class Message:
    """How long a collective takes, and how long before the end of the step it may begin."""

    seconds: float
    ahead_s: float = 0.0


def messages(sent: Sequence[tuple[str, int]], workers: int, timing: Timing, early: bool) -> list[Message]:
    """Return the messages of collectives (operation, bytes) among `workers` neighbours.

    If `early`, they are gradients that are sent during the backward pass, in this order.
    """
    total, done, made = sum(size for _, size in sent) or 1, 0, []
    for op, size in sent:
        done += size
        ahead_s = BACKWARD_SHARE * timing.step_s * (1 - done / total) if early else 0.0
        made.append(Message(timing.collective_s(op, size, workers), ahead_s))
    return made


def arrival(ready: Tensor, free: Tensor, queued: Sequence[Message]) -> Tensor:
    """Return when messages have arrived that go one after another, in seconds of each group of workers.

    `ready` is when the slowest worker of a group ends its step, `free` when its link has sent what was before.

    >>> arrival(torch.tensor(1.0), torch.tensor(0.0), [Message(0.5, ahead_s=0.25), Message(0.5)])
    tensor(1.7500)
    """
    for each in queued:
        free = torch.maximum(free, ready - each.ahead_s) + each.seconds
    return free


@dataclass(frozen=True)
class TimeUse:
    """What the seconds of all workers were used for, as shares of 1.

    `stragglers` is waiting for slower workers, `link` waiting for what is sent, `faults` what was undone, and what a
    fault has cost besides.
    """

    computing: float
    stragglers: float
    link: float
    faults: float

    @staticmethod
    def of(computing_s: float, stragglers_s: float, link_s: float, faults_s: float) -> TimeUse:
        """Make shares of seconds."""
        each = (computing_s, stragglers_s, link_s, faults_s)
        return TimeUse(*(s / (sum(each) or 1.0) for s in each))


class VirtualClock:
    """Counts virtual seconds of all workers.

    Gradients of a DDP model (`overlap`) are sent during the backward pass, bucket by bucket, from the last layer down,
    in one queue. Deltas of a plan with a `delay` are sent while the next steps compute. All else is waited for.
    """

    def __init__(self, workers: int, timing: Timing, overlap: bool, delay: int = 0) -> None:
        self.now = [0.0] * workers
        self._computed: list[dict[int, float]] = [{} for _ in range(workers)]
        """The seconds of each step that was not undone, by worker."""
        self._straggling_s = self._link_s = 0.0
        self._timing = timing
        self._overlap = overlap
        self._delay = delay
        self._free = 0.0
        """When the link has sent everything."""
        self._due: dict[int, float] = {}
        """When what is due after a step has arrived."""
        self._lock = threading.Lock()

    def compute(self, worker: int, step: int) -> None:
        """Let a worker compute one step. The time is the same whenever threads take their turns."""
        timing = self._timing
        drawn = random.Random(f"{timing.seed}/{worker}/{step}").gauss(1.0, timing.jitter)
        slower = timing.stragglers.times if worker < timing.stragglers.count else 1.0
        taken_s = max(0.0, drawn) * slower * timing.step_s
        with self._lock:
            self.now[worker] += taken_s
            self._computed[worker][step] = taken_s

    def served(self, members: Members, sent: list[Collective]) -> None:
        """Let collectives of these workers take their time."""
        early = self._overlap and sent[0].phase == Payload.GRADIENT
        queued = messages([(each.op, each.payload_bytes) for each in sent], len(members), self._timing, early)
        with self._lock:
            ready = max(self.now[worker] for worker in members)
            self._free = float(arrival(_seconds(ready), _seconds(self._free), queued))
            if self._delay and sent[0].phase == Payload.WEIGHTS:
                self._due[sent[0].step + self._delay] = self._free
            else:
                self._bring_together(members, ready, max(ready, self._free))

    def after_step(self, worker: int, step: int) -> None:
        """Let a worker wait for what is due after a step."""
        with self._lock:
            arrived = self._due.get(step, 0.0)
            self._link_s += max(0.0, arrived - self.now[worker])
            self.now[worker] = max(self.now[worker], arrived)

    def rewind(self, members: Members, step: int) -> None:
        """Undo all steps after `step`, which costs the time that they took."""
        with self._lock:
            self._due.clear()
            latest = max(self.now[worker] for worker in members)
            for worker in members:
                self.now[worker] = latest
            self._computed = [{at: s for at, s in each.items() if at <= step} for each in self._computed]

    def use(self) -> TimeUse:
        """Return what the time so far was used for."""
        with self._lock:
            computed_s = sum(sum(each.values()) for each in self._computed)
            rest = sum(self.now) - computed_s - self._straggling_s - self._link_s
            return TimeUse.of(computed_s, self._straggling_s, self._link_s, max(0.0, rest))

    def _bring_together(self, members: Members, ready: float, end: float) -> None:
        self._link_s += len(members) * (end - ready)
        for worker in members:
            self._straggling_s += ready - self.now[worker]
            self.now[worker] = end


def _seconds(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
