"""Steps that a GradScaler skips.

torch's GradScaler does not call `optimizer.step()` when it finds an overflow. Overflows differ between workers as
long as gradients do, so one worker would skip the step at whose end the others wait for it (pytorch issue 76282). An
optimizer that declares support for scaling is always called, with the result in `found_inf`. So laconic declares it for
the optimizer, and skips the update by removing the gradients for that step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.session.unwrap import report_step
from laconic.torch_private.optimizers import is_nested_step

_FLAG = "_step_supports_amp_scaling"


def skips_itself(optimizer: Optimizer) -> bool:
    """Return whether an optimizer skips a step where a tensor says so, as fused ones do: they unscale, too."""
    return bool(getattr(optimizer, _FLAG, False))


class ScaledSteps:
    """Lets one optimizer be called at every step, whatever a GradScaler finds.

    `wrapper` is what a framework has put around the optimizer; it is told which steps were skipped.
    """

    def __init__(self, optimizer: Optimizer, wrapper: object = None) -> None:
        self.optimizer = optimizer
        self._wrapper = wrapper
        self._skipped = False
        self._native = skips_itself(optimizer)
        self._removed: list[tuple[Tensor, Tensor]] = []
        self._flag: Tensor | None = None
        self._begun = False

    def declare(self) -> ScaledSteps:
        """Declare that the optimizer supports scaling: the caller runs `begin_step` and `end_step`."""
        if not self._native:
            setattr(self.optimizer, _FLAG, True)
        return self

    def remove(self) -> None:
        """Take the declaration back."""
        if not self._native:
            delattr(self.optimizer, _FLAG)

    def __enter__(self) -> ScaledSteps:
        self._hooks = [
            self.optimizer.register_step_pre_hook(self._before),
            self.optimizer.register_step_post_hook(self._after),
        ]
        return self.declare()

    def __exit__(self, *_: object) -> None:
        self.remove()
        for hook in self._hooks:
            hook.remove()
        for name in ("found_inf", "grad_scale"):
            if name in vars(self.optimizer):
                delattr(self.optimizer, name)

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_nested_step(optimizer):
            self.begin_step()

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_nested_step(optimizer):
            self.end_step()

    @property
    def has_scale(self) -> bool:
        """Whether a GradScaler drives this step, and the gradients are still multiplied by the loss scale."""
        return self.loss_scale is not None

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale that the gradients are still multiplied by; None if there is none."""
        return getattr(self.optimizer, "grad_scale", None)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, unless that is done: workers may have different scales."""
        scale = self.loss_scale
        if scale is not None:
            torch._foreach_div_([p.grad for p in self._with_gradient() if p.grad is not None], scale)
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]

    def skip_step(self) -> None:
        """Let the step that is about to begin change nothing."""
        self._skipped = True
        for p in self._with_gradient():
            assert p.grad is not None
            self._removed.append((p, p.grad))
            p.grad = None

    def skip_step_if(self, flag: Tensor | None) -> None:
        """Let the step that is about to begin change nothing if the flag is 1.0, without waiting for it."""
        if flag is None:
            return
        assert self._native
        self.optimizer.found_inf = self._flag = flag  # type: ignore[attr-defined]

    @property
    def scaled(self) -> bool:
        """Whether a GradScaler drives this step, and decides about overflows."""
        found = getattr(self.optimizer, "found_inf", None)
        return found is not None and found is not self._flag

    def agree(self) -> None:
        """Set `found_inf` from the averaged gradients, which are the same on every worker."""
        if getattr(self.optimizer, "found_inf", None) is None:
            return
        grads = [p.grad for p in self._with_gradient() if p.grad is not None]
        if grads:
            finite = torch.stack([g.sum() for g in grads]).isfinite().all()
            self.optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]

    def begin_step(self) -> None:
        """Skip the update if the GradScaler has found an overflow."""
        self._begun = True
        found = getattr(self.optimizer, "found_inf", None)
        if self._native or found is None:
            return
        self.unscale()
        self.optimizer.found_inf = None  # type: ignore[attr-defined]  # handled here
        if float(found) > 0:
            self.skip_step()

    def end_step(self) -> None:
        """Put the gradients of a skipped step back."""
        if not self._begun:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step(closure) has not called its closure, in which gradients are "
                "averaged and checked. Compute them before: call closure(), then optimizer.step()."
            )
        report_step(self._wrapper, self._skipped)
        self._begun = self._skipped = False
        for p, grad in self._removed:
            p.grad = grad
        self._removed = []
        if self._flag is not None:
            self.optimizer.found_inf = self._flag = None  # type: ignore[attr-defined]

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that the optimizer holds now."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _with_gradient(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.grad is not None]
