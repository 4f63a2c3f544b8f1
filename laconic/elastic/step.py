"""One step of an elastic loop, and whether workers have agreed in it."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol

from laconic.session.session import Session


class Loop(Protocol):
    """What a step belongs to."""

    @property
    def worker(self) -> int:
        """The index of this worker among those of now."""
        ...

    @property
    def workers(self) -> int:
        """How many workers there are now."""
        ...

    def _end_step(self, error: BaseException | None) -> bool: ...


class Step:
    """One step of the loop; `number` counts from 1. A context manager: what its body lost by a fault is taken back."""

    def __init__(self, run: Loop, number: int) -> None:
        self._run = run
        self.number = number
        self.worker = run.worker
        self.workers = run.workers

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._run._end_step(error)

    def __repr__(self) -> str:
        return f"<Step {self.number}, worker {self.worker} of {self.workers}>"


class Agreed:
    """Tells after each step whether workers have agreed on something that has taken effect by now. The same on all."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._talked = False

    def forget(self) -> None:
        """Begin anew, from a round that all share."""
        self._talked = False

    def after_step(self) -> bool:
        """Whether the step that has just ended leaves all workers with a round to share."""
        session, plan = self._session, self._session.plan
        turns = plan.syncs_at(session.step, session._clock)
        self._talked |= session._clock.since == session.step or any(plan.is_outermost(turn) for turn in turns)
        if not self._talked or session._weight_sync.waiting:
            return False
        self._talked = False
        return True
