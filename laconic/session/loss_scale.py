"""The loss scale that residuals are in.

Under a GradScaler, gradients that are averaged inside backward are multiplied by the loss scale, and so are the
residuals that error feedback keeps of them. When the scale changes, residuals are multiplied by new / old.
"""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import GradScaler

from laconic.codecs.feedback import rescale_residuals
from laconic.comm.queue import CollectiveQueue
from laconic.session.model_state import ModelState
from laconic.torch_private.grad_scaler import scale_of


class LossScale:
    """Brings residuals of gradients to the loss scale of each step, without waiting for the device."""

    def __init__(self, scaler: GradScaler, model_state: ModelState) -> None:
        self._scaler = scaler
        self._model_state = model_state
        self._due = True

    def begin_step(self) -> None:
        """Look at the scale before the next exchange: it changes between steps."""
        self._due = True

    def rescale(self) -> None:
        """Bring the residuals to the scale of now, before the first exchange of a step."""
        now = scale_of(self._scaler) if self._due else None
        self._due = False
        if now is None:
            return
        kept = self._model_state.state.setdefault("loss_scale", {})  # saved with the residuals, dropped with them
        if "scale" in kept:
            rescale_residuals(self._model_state.state["gradient"], now / kept["scale"].to(now.device))
        kept["scale"] = now.clone()

    def equalise(self, queue: CollectiveQueue) -> None:
        """Set the loss scale of all workers to the smallest: local steps may have made them different."""
        now = scale_of(self._scaler)
        mine = float("inf") if now is None else float(now)
        smallest = float(queue.gather(torch.tensor([mine], dtype=torch.float64)).min())
        if now is not None and smallest != mine:
            self._scaler.update(smallest)
