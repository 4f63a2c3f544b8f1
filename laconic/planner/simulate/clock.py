"""The virtual clock of a simulated training: each worker's own time, which collectives bring together."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

from laconic.comm.in_process import Collective, Members
from laconic.planner.simulate.timing import Timing

BACKWARD_SHARE = 2 / 3
"""The share of a step that the backward pass takes: it computes two products where the forward pass computes one."""


@dataclass
class TimeLost:
    """Seconds in which workers do not compute, as sums over workers, by what they wait for."""

    stragglers: float = 0.0
    link: float = 0.0
    faults: float = 0.0


class VirtualClock:
    """Counts virtual seconds of all workers.

    Gradients of a DDP model (`overlap`) are sent during the backward pass, bucket by bucket, from the last layer down,
    in one queue. Deltas of a plan with a `delay` are sent while the next steps compute. All else is waited for.
    """

    def __init__(self, workers: int, timing: Timing, overlap: bool, delay: int = 0) -> None:
        self.now = [0.0] * workers
        self.computed_s = 0.0
        self.lost = TimeLost()
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
            self.computed_s += taken_s

    def served(self, members: Members, sent: list[Collective]) -> None:
        """Let collectives of these workers take their time."""
        with self._lock:
            ready = max(self.now[worker] for worker in members)
            early = self._overlap and sent[0].phase == "gradient"
            total = sum(each.payload_bytes for each in sent) or 1
            done, queued = 0, self._free
            for each in sent:
                done += each.payload_bytes
                ahead = BACKWARD_SHARE * self._timing.step_s * (1 - done / total) if early else 0.0
                taken_s = self._timing.collective_s(each.op, each.payload_bytes, len(members))
                queued = max(queued, ready - ahead) + taken_s
            self._free = max(self._free, queued)
            if self._delay and sent[0].phase == "weights":
                due = sent[0].step + self._delay
                self._due[due] = max(queued, self._due.get(due, 0.0))
            else:
                self._bring_together(members, ready, max(ready, queued))

    def after_step(self, worker: int, step: int) -> None:
        """Let a worker wait for what is due after a step."""
        with self._lock:
            arrived = self._due.get(step, 0.0)
            self.lost.link += max(0.0, arrived - self.now[worker])
            self.now[worker] = max(self.now[worker], arrived)

    def rewind(self, members: Members, before: float) -> None:
        """Count the time since `before`, when the last commit was, as lost to a fault."""
        with self._lock:
            self._due.clear()
            latest = max(self.now[worker] for worker in members)
            self.lost.faults += len(members) * (latest - before)
            for worker in members:
                self.now[worker] = latest

    def _bring_together(self, members: Members, ready: float, end: float) -> None:
        self.lost.link += len(members) * (end - ready)
        for worker in members:
            self.lost.stragglers += ready - self.now[worker]
            self.now[worker] = end
