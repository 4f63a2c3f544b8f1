"""What the loggers have in common: which worker writes, when, and what.

A listener writes the metrics of `laconic.session.metrics` every few steps, and the losses that the training passes to
`session.report`, both against steps and against the bytes that this worker has sent. It sends nothing to the other
workers, and waits for a GPU only where it writes. A logger that fails does not stop the training.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from laconic import Session, StepObserver
from laconic.session.metrics import LOSSES, METRICS, Sample, samples
from laconic.session.observers import Validation
from laconic.values import is_whole

logger = logging.getLogger(__name__)
PREFIX = "laconic"
"""What all names begin with."""


class Listener(StepObserver):
    """Calls `open`, `write`, `write_against_bytes` and `close` of its subclasses, on the first worker or on all."""

    def __init__(self, every: int, all_workers: bool) -> None:
        if not is_whole(every):
            raise ValueError(
                f"{type(self).__name__}(every={every!r}): it must be a whole number of steps above 0, such as 10."
            )
        self.worker = 0
        """The rank of this worker."""
        self.all_workers = all_workers
        self.latest: dict[str, Sample] = {}
        """What was written last, by key. Replaced and never changed, so that other threads may read it."""
        self._every = every
        self._writes = False
        self._next: dict[str, int] = {}
        """From which step on the metrics, and each loss, are written again."""
        self._drawn: dict[str, int] = {}
        """The bytes against which each loss was written last."""
        self._measured = -1
        """The step whose metrics were written last."""
        self._failed = False

    def open(self, session: Session) -> None:
        """Begin to write. May refuse."""

    def write(self, step: int, some: Sequence[Sample]) -> None:
        """Write samples of a step: those of all metrics, or a loss."""

    def write_against_bytes(self, sent_bytes: int, loss: Sample) -> None:
        """Write a loss against the bytes that this worker has sent, whenever these have grown."""

    def close(self) -> None:
        """End what `open` began."""

    def attached(self, session: Session) -> None:
        """Open the logger on the worker that writes."""
        group = session.group
        self.worker = dist.get_rank() if dist.is_initialized() else 0 if group is None else group.rank()
        self._writes = self.all_workers or self.worker == 0
        if self._writes:
            self.open(session)

    def after_step(self, session: Session) -> None:
        """Write the metrics, if it is time."""
        if self._writes and self._due("metrics", session.step):
            self._write_metrics(session)

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None) -> bool:
        """Write the losses, if it is time. A function that validates is not called: it may need all workers."""
        for name, value in zip(LOSSES, (loss, validation), strict=True):
            if self._writes and value is not None and not callable(value) and self._due(name, session.step):
                number = float(value.detach() if isinstance(value, Tensor) else value)
                self._write_loss(session, Sample(METRICS[name], number))
        return False

    def detached(self, session: Session) -> None:
        """Write the metrics of the last step, and close."""
        if self._writes:
            if session.step != self._measured:
                self._write_metrics(session)
            self._writes = False
            self._try(self.close)

    def _due(self, what: str, step: int) -> bool:
        due = step >= self._next.get(what, 0) or step < self._next[what] - self._every  # an older state was loaded
        if due:
            self._next[what] = step - step % self._every + self._every
        return due

    def _write_metrics(self, session: Session) -> None:
        self._measured = session.step
        measured = list(samples(session, losses=False))
        losses = {key: each for key, each in self.latest.items() if each.metric.name in LOSSES}
        self.latest = {each.key: each for each in measured} | losses
        self._try(lambda: self.write(session.step, measured))

    def _write_loss(self, session: Session, loss: Sample) -> None:
        self.latest = self.latest | {loss.key: loss}
        self._try(lambda: self.write(session.step, [loss]))
        sent = session.ledger.wire_bytes
        if sent > self._drawn.get(loss.key, -1):
            self._drawn[loss.key] = sent
            self._try(lambda: self.write_against_bytes(sent, loss))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:  # a full disk or a lost server: no reason to end a training of many workers
            if not self._failed:
                logger.warning("%s: metrics could not be written: %s. Training goes on.", type(self).__name__, error)
            self._failed = True
