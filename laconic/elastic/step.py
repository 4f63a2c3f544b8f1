"""One step of an elastic loop."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from laconic.elastic.run import Run


class Step:
    """One step of the loop; `number` counts from 1. A context manager: what its body lost by a fault is taken back."""

    def __init__(self, run: Run, number: int) -> None:
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
