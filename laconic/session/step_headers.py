"""What a worker states in its headers beside the step: what it has counted, its round, a request to stop.

- Weighted means: how many samples or tokens this worker has counted, by `session.weigh`, since each synchronisation.
  The mean of what workers hold is then sum(n_i * x_i) / sum(n_i). What worker i sends is multiplied by its share,
  n_i * workers / sum(n), before the codec (`Headers.shares`). Shares are 1 on average, so codecs, residuals and outer
  steps stay as they are: what is delivered plus what residuals keep is the weighted truth.
- Rounds that end by the clock, as of `diloco(every="30s")`. Workers take different numbers of steps in such a round.
  What all of them count alike is the round: headers compare it in the place of the step, and they state how many steps
  each worker has taken.
- Stopping together: one worker gets a signal, and all workers stop after the same step. A launcher that takes a machine
  away sends SIGTERM, and SIGKILL half a minute later. The signal handler only sets a flag. It is sent in the headers
  that workers exchange anyway, before weights and before the gradients of a bare module; DDP and sharded models
  exchange a header for it about twice a second.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from types import FrameType
from typing import Any

from torch import nn

from laconic.checks.headers import NOT_COUNTED, Header, Headers
from laconic.plans.plan import Plan
from laconic.plans.schedules import Never, Payload, Streaming, Sync, Timed
from laconic.session.live_model import LiveModel
from laconic.values import is_whole

GRADIENT = "gradient"
MOST_STEPS = 64
"""After how many steps at most models that average gradients in backward exchange headers under `stop_on`."""


class Counts:
    """What this worker has counted in all, and how much of it was counted before each last synchronisation.

    Not everything is synchronised at once, so there is one number for each thing that is: for the gradients of a step,
    for the weights of a round, for each fragment since it was sent, and for each level of groups.
    """

    def __init__(self) -> None:
        self._calls = self._total = 0
        self._base = (0, 0)
        """Calls and total when all weights were last the same on all workers."""
        self._last: dict[str, tuple[int, int]] = {}
        """Calls and total at the last synchronisation since then, by what was synchronised."""

    def add(self, n: int) -> None:
        """Count `n` more."""
        if not is_whole(n, least=0):
            raise ValueError(
                f"weigh({n!r}): it must be a whole number of samples or tokens, at least 0. Of a tensor, give "
                "int(tensor); a worker without data in this step counts 0."
            )
        self._calls, self._total = self._calls + 1, self._total + n

    def of_gradients(self) -> int:
        """Return what was counted for the gradients of this step, or `NOT_COUNTED`."""
        return self._since(self._last.get(GRADIENT, self._base))

    def of_weights(self, plan: Plan, sync: Sync) -> int:
        """Return what was counted for a synchronisation of weights, or `NOT_COUNTED`."""
        return self._since(self._last.get(_key(plan, sync), self._base))

    def of_all_weights(self, plan: Plan) -> int:
        """Return what was counted since all weights were synchronised: 0 if nothing was."""
        schedule = plan.schedule
        fragments = range(schedule.fragments) if isinstance(schedule, Streaming) else ()
        keys = [_key(plan, Sync(Payload.WEIGHTS, fragment=each)) for each in fragments]
        return max(0, self._since(min((self._last.get(key, self._base) for key in keys), default=self._base)))

    def synced(self, plan: Plan, sync: Sync) -> None:
        """Count from 0 for what was synchronised now, and for what that contains."""
        now = self._calls, self._total
        if sync.payload is Payload.GRADIENT:
            self._last[GRADIENT] = now
        elif sync.fragment is not None:
            self._last[_key(plan, sync)] = now
        else:  # smaller groups than this one hold the same weights now
            inside = plan.levels[: plan.levels.index(sync.level) + 1]
            self._last |= {_key(plan, Sync(Payload.WEIGHTS, level)): now for level in inside}
        if sync.fragment is None and plan.is_outermost(sync):
            self.all_synced()

    def all_synced(self) -> None:
        """Count from 0 for all: the workers are the same."""
        self._base, self._last = (self._calls, self._total), {}

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers."""
        last = {key: [*at] for key, at in self._last.items()}
        return {"now": [self._calls, self._total], "base": [*self._base], "last": last}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._calls, self._total = saved["now"]
        self._base = (saved["base"][0], saved["base"][1])
        self._last = {key: (calls, total) for key, (calls, total) in saved["last"].items()}

    def _since(self, at: tuple[int, int]) -> int:
        calls, total = at
        return NOT_COUNTED if calls == self._calls else self._total - total


def _key(plan: Plan, sync: Sync) -> str:
    if sync.fragment is not None:
        return f"fragment {sync.fragment}"
    return "world" if plan.is_outermost(sync) else f"groups of {sync.level}"


@dataclass(eq=False)
class Rounds:
    """The rounds of one worker."""

    ended: int = 0
    """How many all workers have ended."""
    taken: int = 0
    """How many steps this worker has taken in this one, without those that it has skipped."""
    progress: float = 0.0
    """The mean of all workers' steps, up to the end of the last round."""
    _began_s: float = field(default_factory=lambda: monotonic())

    @property
    def elapsed_s(self) -> float:
        """How long ago this round began."""
        return monotonic() - self._began_s

    def restart_clock(self) -> None:
        """Count the time of the round from now on."""
        self._began_s = monotonic()

    def received(self, headers: Headers) -> None:
        """End the round: every worker has stated how many steps it has taken."""
        self.ended += 1
        self.progress += sum(each.taken or 0 for each in headers.all) / len(headers.all)

    def state_dict(self) -> dict[str, float]:
        """Return the numbers. The time is not among them."""
        return {"ended": self.ended, "taken": self.taken, "progress": self.progress}

    def load_state_dict(self, saved: dict[str, float]) -> None:
        """Load what `state_dict` returned."""
        self.ended, self.taken, self.progress = int(saved["ended"]), int(saved["taken"]), saved["progress"]


def check_rounds(plan: Plan, model: nn.Module, sharded: bool) -> None:
    """Refuse rounds by time where workers must take each step together."""
    if not isinstance(plan.schedule, Timed):
        return
    together = "the shards of one replica" if sharded else ""
    if any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
        together = "SyncBatchNorm"
    if together:
        raise ValueError(
            f"{plan!r}: {together} must be computed in the same steps on all workers, and a round by time ends at "
            "another step on each. Choose rounds by steps, such as diloco(period=16)."
        )


@dataclass(eq=False)
class Stop:
    """Whether this worker was asked to stop, and whether all workers know that some worker was."""

    watched: bool = False
    every_s: float = 0.5
    asked: bool = False
    agreed: bool = False
    _due: int = 0
    """The step of the next exchange of headers."""
    _last: tuple[int, float] | None = None
    """The step of the last exchange, and its time."""

    def on(self, signals: Sequence[signal.Signals], every_s: float) -> None:
        """Take these signals as a request to stop."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                f"stop_on({', '.join(each.name for each in signals)}) in thread {threading.current_thread().name!r}: "
                "Python sets signal handlers in the main thread alone. Call it there, after attach."
            )
        self.watched, self.every_s = True, every_s
        for each in signals:
            signal.signal(each, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def is_due(self, step: int) -> bool:
        """Return whether headers are exchanged in this step."""
        return self.watched and step >= self._due

    def step_ms(self, step: int) -> int:
        """Return how long a step takes on this worker; 0 if unknown."""
        if self._last is None or step <= self._last[0]:
            return 0
        return max(1, round(1000 * (monotonic() - self._last[1]) / (step - self._last[0])))

    def exchanged(self, step: int, slowest_ms: int) -> None:
        """Set the step of the next exchange, from the duration of the slowest worker, the same on all."""
        self._last = (step, monotonic())
        steps = 1000 * self.every_s / slowest_ms if slowest_ms else 1
        self._due = step + max(1, int(min(MOST_STEPS, steps)))

    def restart(self) -> None:
        """Exchange headers at the next step, whichever that is."""
        self._due, self._last = 0, None


@dataclass(eq=False)
class StepHeaders:
    """Makes this worker's headers for the step that comes next."""

    plan: Plan
    live: LiveModel
    stop: Stop
    step: int = 1
    stop_due: bool = False
    """Whether a header is exchanged beside gradients in this step, only to stop together."""
    rounds: Rounds | None = None
    """Where rounds end by the clock."""

    def begin_step(self, plan: Plan, step: int, among_all: bool) -> None:
        """Make headers of this step from now on, in which all workers average gradients or not."""
        self.plan, self.step = plan, step
        self.stop_due = among_all and self.stop.is_due(step)
        if isinstance(plan.schedule, Never):  # no header carries it to the others
            self.stop.agreed = self.stop.agreed or self.stop.asked

    def header(
        self, *, finite: bool = True, with_gradient: int = 0, step_ms: int = 0, count: int | None = None
    ) -> Header:
        """Make a header."""
        number, taken = self.step, None
        if self.rounds is not None and self.step >= self.plan.schedule.start:
            number, taken = self.rounds.ended + 1, self.rounds.taken
            count = taken if count is None else count
        model = self.live.facts
        return Header(number, self.plan.text, model, finite, self.stop.asked, with_gradient, step_ms, count, taken)

    def stop_header(self, count: int | None = None) -> Header:
        """Make a header that says how long steps take."""
        return self.header(step_ms=self.stop.step_ms(self.step), count=count)

    def received(self, headers: Headers, among_all: bool) -> None:
        """Note whether some worker was asked to stop. Only what all workers receive after the same step counts."""
        self.stop.agreed = self.stop.agreed or (headers.stop and among_all)
        if self.rounds is not None and headers.all[0].taken is not None:
            self.rounds.received(headers)
