"""Clipping by norm inside the session: `attach(..., clip_norm=1.0)`.

The gradient that an optimizer is about to step with is scaled down to this norm: after it was averaged, on every kind
of model. It is `clip_grad_norm_` at the one place where it means the same on a DDP model, on shards and on a bare
module, with and without a GradScaler. What the clip cuts is not returned to the residuals of error feedback: then the
residuals grow as long as gradients are longer than the norm, and training fails (docs/log.md, 2026-11-16).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from laconic.session.grad_scaler import ScaledSteps
from laconic.session.model_state import local_of
from laconic.values import is_number


class Clipping:
    """Clips the gradients of each optimizer right before it steps; None clips nothing."""

    def __init__(self, clip_norm: float | None) -> None:
        if clip_norm is not None and not (is_number(clip_norm) and clip_norm > 0):
            raise ValueError(
                f"attach(clip_norm={clip_norm!r}): it must be a number above 0, such as 1.0. Leave it out not to clip."
            )
        self.clip_norm = clip_norm

    @torch.no_grad()
    def clip(self, optimizer: ScaledSteps) -> None:
        """Scale the gradients of an optimizer down to the norm, without waiting for the device."""
        if self.clip_norm is None:
            return
        grads = [_dense(p) for p in optimizer.parameters() if p.grad is not None]
        if not grads:
            return
        norm = _whole(torch.nn.utils.get_total_norm(grads))
        if optimizer.loss_scale is not None:
            norm = norm / optimizer.loss_scale.to(norm.device)
        factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        by_device: dict[torch.device, list[Tensor]] = {}
        for g in map(local_of, grads):
            by_device.setdefault(g.device, []).append(g)
        for device, tensors in by_device.items():
            torch._foreach_mul_(tensors, factor.to(device))


def _dense(p: Tensor) -> Tensor:
    """Return the gradient, or the numbers of a sparse one, in their own memory."""
    grad = p.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    p.grad = grad.coalesce()
    return p.grad.values()


def _whole(norm: Tensor) -> Tensor:
    """Return the norm over all shards."""
    sharding = sys.modules.get("torch.distributed.tensor")
    return norm.full_tensor() if sharding is not None and isinstance(norm, sharding.DTensor) else norm
