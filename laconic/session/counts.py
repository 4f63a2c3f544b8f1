"""Weighted means: how many samples or tokens this worker has counted, by `session.weigh`, since each synchronisation.

The mean of what workers hold is then sum(n_i * x_i) / sum(n_i). What worker i sends is multiplied by its share,
n_i * workers / sum(n), before the codec (`Headers.shares`). Shares are 1 on average, so codecs, residuals and outer
steps stay as they are: what is delivered plus what residuals keep is the weighted truth.

Not everything is synchronised at once, so there is one number for each thing that is: for the gradients of a step, for
the weights of a round, for each fragment since it was sent, and for each level of groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from laconic.checks.headers import NOT_COUNTED
from laconic.plans.plan import Plan
from laconic.plans.schedules import Payload, Streaming, Sync
from laconic.values import is_whole

GRADIENT = "gradient"


class Counts:
    """What this worker has counted in all, and how much of it was counted before each last synchronisation."""

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
