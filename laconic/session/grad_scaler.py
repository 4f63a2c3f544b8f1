"""Steps that a GradScaler skips.

torch's GradScaler does not call `optimizer.step()` when it finds an overflow. Overflows differ between workers as
long as gradients do, so one worker would skip the step at whose end the others wait for it
(pytorch issue 76282). An optimizer that says it supports scaling is always called, with the verdict in
`found_inf`: laconic says so on its behalf and leaves the update out by taking the gradients away for that step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_FLAG = "_step_supports_amp_scaling"


def skips_by_itself(optimizer: Optimizer) -> bool:
    """Whether an optimizer is told by a tensor to leave a step out, as fused ones are: they unscale, too."""
    return bool(getattr(optimizer, _FLAG, False))


class LossScaling:
    """Keeps one optimizer's steps in count, whatever a GradScaler finds."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._native = skips_by_itself(optimizer)
        self._taken: list[tuple[Tensor, Tensor]] = []
        self._told = False

    def attach(self) -> LossScaling:
        """Begin; return the handle that ends it."""
        if not self._native:
            setattr(self.optimizer, _FLAG, True)
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        return self

    def remove(self) -> None:
        """End."""
        for hook in self._hooks:
            hook.remove()
        if not self._native:
            delattr(self.optimizer, _FLAG)

    def __enter__(self) -> LossScaling:
        return self.attach()

    def __exit__(self, *_: object) -> None:
        self.remove()
        for name in ("found_inf", "grad_scale"):
            if name in vars(self.optimizer):
                delattr(self.optimizer, name)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, if that is still to be done, so that workers speak of one thing."""
        scale = getattr(self.optimizer, "grad_scale", None)
        if scale is not None:
            torch._foreach_div_([p.grad for p in self._with_gradient() if p.grad is not None], scale)
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def leave_out(self) -> None:
        """Let the step that is about to begin change nothing: its gradients are of no use."""
        for p in self._with_gradient():
            assert p.grad is not None
            self._taken.append((p, p.grad))
            p.grad = None

    def leave_out_if(self, verdict: Tensor | None) -> None:
        """Let the step that is about to begin change nothing if the verdict is 1.0, wherever that is known."""
        if verdict is None:
            return
        assert self._native
        self.optimizer.found_inf = verdict  # type: ignore[attr-defined]
        self._told = True

    @property
    def scaled(self) -> bool:
        """Whether a GradScaler drives this step, and decides about overflows."""
        return not self._told and getattr(self.optimizer, "found_inf", None) is not None

    def agree(self) -> None:
        """After gradients were averaged: what is not finite now is so on every worker."""
        if getattr(self.optimizer, "found_inf", None) is None:
            return
        grads = [p.grad for p in self._with_gradient() if p.grad is not None]
        if grads:
            finite = torch.stack([g.sum() for g in grads]).isfinite().all()
            self.optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = getattr(optimizer, "found_inf", None)
        if self._native or found is None:
            return
        self.unscale()
        optimizer.found_inf = None  # type: ignore[attr-defined]  # the verdict is carried out here
        if float(found) > 0:
            self.leave_out()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for p, grad in self._taken:
            p.grad = grad
        self._taken = []
        if self._told:
            self.optimizer.found_inf, self._told = None, False  # type: ignore[attr-defined]

    def _with_gradient(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
