"""Write a session's metrics to Weights & Biases.

    from laconic.integrations.wandb import WandB

    session.observe(WandB("my-project", every=10))         # starts a run on the worker that writes
    session.observe(WandB(wandb.init(...), every=10))      # or a run that you have started

`laconic/loss_against_megabytes` has `laconic/megabytes_sent` as its x axis. WANDB_MODE=offline keeps the run on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import wandb

from laconic import Session
from laconic.integrations.listener import PREFIX, Listener
from laconic.session.metrics import LOSSES, Sample


class WandB(Listener):
    """Logs to a run: to one that you give it, or to a new one of a project, which ends when the session detaches.

    What it logs to a run of yours joins the row of your own next `run.log`, so that your steps stay as they are.
    """

    def __init__(self, run: Any, *, every: int = 10, all_workers: bool = False) -> None:
        super().__init__(every, all_workers)
        if not isinstance(run, str) and not hasattr(run, "define_metric"):
            raise TypeError(
                f"WandB({run!r}): the first argument is the name of a project, or a run that wandb.init() has returned."
            )
        self._own = isinstance(run, str)
        self._given = run

    def open(self, session: Session) -> None:
        """Start the run, if it is ours, and define its axes."""
        name = f"worker-{self.worker}" if self.all_workers else None
        self._run = wandb.init(project=self._given, name=name) if self._own else self._given
        self._run.config.update({f"{PREFIX}_plan": repr(session.plan), f"{PREFIX}_workers": session.workers})
        self._run.define_metric(f"{PREFIX}/step")
        self._run.define_metric(f"{PREFIX}/*", step_metric=f"{PREFIX}/step")
        self._run.define_metric(f"{PREFIX}/megabytes_sent")
        for loss in LOSSES:
            self._run.define_metric(f"{PREFIX}/{loss}_against_megabytes", step_metric=f"{PREFIX}/megabytes_sent")

    def write(self, step: int, some: Sequence[Sample]) -> None:
        """Log a row."""
        self._log({f"{PREFIX}/{each.key}": each.value for each in some} | {f"{PREFIX}/step": step})

    def write_against_bytes(self, sent_bytes: int, loss: Sample) -> None:
        """Log a row with the megabytes."""
        megabytes = sent_bytes / 1e6
        self._log({f"{PREFIX}/{loss.key}_against_megabytes": loss.value, f"{PREFIX}/megabytes_sent": megabytes})

    def close(self) -> None:
        """End the run, if it is ours."""
        if self._own:
            self._run.finish()

    def _log(self, row: dict[str, float]) -> None:
        self._run.log(row, commit=self._own)
