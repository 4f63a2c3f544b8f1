"""Optimizers that are made for a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class DeMo(Optimizer):
    """Steps by the sign of what the plan `demo()` delivers (decoupled momentum, Peng et al. 2024, arXiv:2411.19870).

        optimizer = laconic.optim.DeMo(model.parameters(), lr=1e-3)
        session = laconic.attach(laconic.demo(), model, optimizer)

    p <- p * (1 - lr * weight_decay) - lr * sign(q), where q is the gradient that the session has averaged. The momentum
    is the residual of the plan's codec, with the plan's `decay`: it is in the session's state, and this optimizer keeps
    nothing but its options. Under another plan it has no momentum.
    """

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if not value >= 0:
                raise ValueError(f"DeMo({name}={value!r}): {name} must be a number of at least 0.")
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; return what the closure returns, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise RuntimeError(
                        "DeMo: a gradient is sparse, and momentum is dense. Make the embedding with sparse=False."
                    )
                real, grad = (torch.view_as_real(p), torch.view_as_real(p.grad)) if p.is_complex() else (p, p.grad)
                real.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * grad.sign())
        return loss
