"""One step of an elastic loop, and the rule for which steps are committed."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from laconic import Session


class Step:
    """One step of the loop; `number` counts from 1. A context manager: a step that loses a worker is undone."""

    def __init__(self, number: int, worker: int, workers: int, end: Callable[[BaseException | None], bool]) -> None:
        self.number, self.worker, self.workers = number, worker, workers
        self._end = end

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        return self._end(error)

    def __repr__(self) -> str:
        return f"<Step {self.number}, worker {self.worker} of {self.workers}>"


class CommitClock:
    """Decides after each step whether to commit it: every `every` synchronisations among all workers.

    The decision is the same on all workers. Fragments that are in flight must take effect first.
    """

    def __init__(self, session: Session, every: int = 1) -> None:
        self._session, self._every = session, every
        self.reset()

    def reset(self) -> None:
        """Start counting again, from a step that all workers share."""
        self._synced, self._count = False, 0

    def is_due(self) -> bool:
        """Return whether to commit the step that has just ended. Called once after each step."""
        self._synced |= self._session.synced
        if not self._synced or self._session.in_flight:
            return False
        self._synced = False
        self._count += 1
        return self._count % self._every == 0
