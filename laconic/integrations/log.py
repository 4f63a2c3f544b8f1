"""Write a session's metrics to a file or to any tool for experiments, every few steps.

    from laconic.integrations.log import Log, TensorBoard, Wandb

    session.observe(TensorBoard("runs/power_sgd"))
    session.observe(Wandb("my-project"))
    session.observe(Log(lambda metrics, step: print(step, metrics), every=100))

docs/metrics.md has the lines for MLflow, Prometheus, OpenTelemetry and plain JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch.distributed as dist
from torch import Tensor

from laconic.session.observers import StepObserver, Validation
from laconic.session.session import Session
from laconic.values import is_whole

__all__ = ["Log", "TensorBoard", "Wandb"]

logger = logging.getLogger(__name__)

Write: TypeAlias = Callable[[dict[str, float], int], object]


class Log(StepObserver):
    """Calls `write(session.metrics(), session.step)` every `every` steps and at the end, on worker 0.

    It does so when the training reports the loss of that step, at the latest before the next step. With `all_workers`,
    each worker writes its own metrics. If `write` raises an error, the first one is logged and training goes on. It
    sends nothing to other workers, and waits for a GPU only at the steps that it writes.
    """

    def __init__(self, write: Write, *, every: int = 10, all_workers: bool = False) -> None:
        if not callable(write):
            raise TypeError(
                f"Log({write!r}): write must be a function of metrics and step, such as "
                "lambda metrics, step: print(step, metrics)."
            )
        if not is_whole(every):
            raise ValueError(f"Log(every={every!r}): every must be a whole number of at least 1. Use 10, for example.")
        self._write, self._every, self._all_workers = write, every, all_workers
        self._due = False
        self._last = -1
        """The step that was written last."""
        self._failed = False

    def after_step(self, session: Session) -> None:
        """Note that it is time: `session.report` gives the loss of this step only now."""
        self._due = session.step % self._every == 0

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None) -> bool:
        """Write, if it is time."""
        self._write_if_due(session)
        return False

    def before_step(self, session: Session) -> None:
        """Write, if it is time and the training has not reported the loss of the last step."""
        self._write_if_due(session)

    def detached(self, session: Session) -> None:
        """Write the metrics of the last step."""
        self._due = session.step != self._last
        self._write_if_due(session)

    def _write_if_due(self, session: Session) -> None:
        if not self._due or (not self._all_workers and _rank(session) != 0):
            return
        self._due, self._last = False, session.step
        try:
            self._write(session.metrics(), session.step)
        except Exception as error:  # a full disk or a lost server: no reason to end a training of many workers
            if not self._failed:
                logger.warning("Log: metrics could not be written: %s. Training goes on.", error)
            self._failed = True


def _rank(session: Session) -> int:
    if dist.is_initialized():
        return dist.get_rank()
    return 0 if session.group is None else session.group.rank()  # an elastic run makes its groups by itself


def TensorBoard(folder: str | Path, *, every: int = 10) -> Log:
    """Return a `Log` that writes event files to `folder`: all metrics against steps, the loss also against bytes."""

    @cache
    def writer() -> Any:  # made by the first write: the other workers must not write files
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(folder)

    def write(metrics: dict[str, float], step: int) -> None:
        for key, value in metrics.items():
            writer().add_scalar(f"laconic/{key}", value, step)
        if "loss" in metrics:
            writer().add_scalar("laconic/loss_against_bytes", metrics["loss"], _sent_bytes(metrics))
        writer().flush()

    return Log(write, every=every)


def Wandb(project: str | None = None, *, every: int = 10) -> Log:
    """Return a `Log` for Weights & Biases: it joins the rows of the run that you have begun, or begins one of its own.

    `laconic/step` and `laconic/megabytes_sent` are in every row, for the x axis of a chart.
    """

    @cache
    def run() -> tuple[Any, bool]:
        import wandb

        own = wandb.run is None
        found = wandb.init(project=project) if own else wandb.run
        found.define_metric("laconic/*", step_metric="laconic/step")
        return found, own

    def write(metrics: dict[str, float], step: int) -> None:
        row = {"step": step, "megabytes_sent": _sent_bytes(metrics) / 1e6, **metrics}
        found, own = run()
        found.log({f"laconic/{key}": value for key, value in row.items()}, commit=own)  # your next log commits yours

    return Log(write, every=every)


def _sent_bytes(metrics: dict[str, float]) -> int:
    return int(sum(value for key, value in metrics.items() if key.startswith("wire_bytes/")))
