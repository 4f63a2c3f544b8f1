"""Fragments that are averaged while training goes on, and take effect when they are due."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.futures import Future

from laconic.ledger import Ledger
from laconic.plans.plan import Plan
from laconic.plans.schedules import Streaming
from laconic.session.anchor import Anchor
from laconic.session.model_state import ModelState, copied


@dataclass(eq=False)
class Fragment:
    """A fragment in flight, and the step after which it takes effect."""

    part: int
    due: int
    sent: dict[str, Tensor]
    """This worker's weights when it sent its deltas; empty unless it keeps what they move meanwhile (mix=None)."""
    means: list[dict[str, Tensor]] = field(default_factory=list)
    futures: list[Future[Tensor]] = field(default_factory=list)

    def wait(self) -> list[dict[str, Tensor]]:
        """Return the mean deltas, when all have arrived."""
        for future in self.futures:
            future.wait()
        return self.means


class InFlight:
    """The fragments of one model that were sent and have not taken effect, oldest first."""

    def __init__(self, model_state: ModelState, anchor: Anchor) -> None:
        self._model_state = model_state
        self._anchor = anchor
        self._fragments: list[Fragment] = []

    def __bool__(self) -> bool:
        return bool(self._fragments)

    def new(self, schedule: Streaming, part: int, step: int, names: Sequence[str]) -> Fragment:
        """Add a fragment of these parameters, which is sent after `step`."""
        fragment = Fragment(part, step + schedule.delay, self._own(names if schedule.mix is None else ()))
        self._fragments.append(fragment)
        return fragment

    def settle(self, plan: Plan, step: int, ledger: Ledger) -> None:
        """Let fragments that are due by `step` take effect."""
        while self._fragments and self._fragments[0].due <= step:
            assert isinstance(plan.schedule, Streaming)
            self._model_state.refresh()
            first, since_s = self._fragments[0], time.perf_counter()
            means = first.wait()
            ledger.add_wait(since_s)
            for mean in means:
                self._anchor.move(plan.outer, mean, plan.schedule.mix, first.sent)
            del self._fragments[0]

    def restart(self) -> None:
        """Note that this worker went back to the anchor: what it has moved counts from there."""
        for fragment in self._fragments:
            fragment.sent = self._own(fragment.sent)

    def drop(self) -> None:
        """Drop all of them, without waiting."""
        self._fragments = []

    def _own(self, names: Iterable[str]) -> dict[str, Tensor]:
        params = self._model_state.params
        return {name: params[name].detach().clone() for name in names if name in params}

    def state(self) -> list[dict[str, Any]]:
        """Return what must be saved. Waits for all of them."""
        return [
            {"part": each.part, "due": each.due, "sent": each.sent, "means": each.wait()} for each in self._fragments
        ]

    def load(self, saved: Iterable[Mapping[str, Any]]) -> None:
        """Load what `state` returned."""
        devices = self._model_state.devices
        self._fragments = [
            Fragment(
                each["part"], each["due"], copied(each["sent"], devices), [copied(x, devices) for x in each["means"]]
            )
            for each in saved
        ]
