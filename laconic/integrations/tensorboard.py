"""Write a session's metrics to TensorBoard.

    from laconic.integrations.tensorboard import TensorBoard

    session.observe(TensorBoard("runs/power_sgd", every=10))
    ...
    session.report(loss=loss)         # after each step: the curves of the loss, against steps and against bytes sent

`laconic/loss_against_bytes` has the bytes that this worker has sent where TensorBoard has its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from laconic import Session
from laconic.integrations.listener import PREFIX, Listener
from laconic.session.metrics import Sample


class TensorBoard(Listener):
    """Writes event files to `log_dir`; with `all_workers`, each to a folder of its own in it."""

    def __init__(self, log_dir: str | Path, *, every: int = 10, all_workers: bool = False) -> None:
        super().__init__(every, all_workers)
        self._folder = Path(log_dir)

    def open(self, session: Session) -> None:
        """Open the event file, and write the plan."""
        self._writer = SummaryWriter(self._folder / f"worker-{self.worker}" if self.all_workers else self._folder)
        self._writer.add_text(f"{PREFIX}/plan", f"`{session.plan!r}`, {session.workers} workers")

    def write(self, step: int, some: Sequence[Sample]) -> None:
        """Write a scalar for each sample."""
        for each in some:
            self._writer.add_scalar(f"{PREFIX}/{each.key}", each.value, step)

    def write_against_bytes(self, sent_bytes: int, loss: Sample) -> None:
        """Write the loss with the bytes as its step."""
        self._writer.add_scalar(f"{PREFIX}/{loss.key}_against_bytes", loss.value, sent_bytes)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
