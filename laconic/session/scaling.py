"""Steps under a GradScaler, the loss scale of residuals, clipping by norm, and closures.

torch's GradScaler does not call `optimizer.step()` when it finds an overflow. Overflows differ between workers as
long as gradients do, so one worker would skip the step at whose end the others wait for it (pytorch issue 76282). An
optimizer that declares support for scaling is always called, with the result in `found_inf`. So laconic declares it for
the optimizer while a GradScaler steps, and skips the update by removing the gradients for that step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from laconic.codecs.feedback import rescale_residuals
from laconic.comm.queue import CollectiveQueue
from laconic.session.foreign import report_step
from laconic.session.live_model import LiveModel, local_of
from laconic.torch_private import steps
from laconic.torch_private.foreach import divide_all, multiply_all
from laconic.torch_private.steps import scale_of
from laconic.values import is_number

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


class ScaledSteps:
    """Lets one optimizer be called at every step, whatever a GradScaler finds.

    `wrapper` is what a framework has put around the optimizer; it is notified of steps that were skipped.
    """

    def __init__(self, optimizer: Optimizer, wrapper: object = None) -> None:
        self.optimizer = optimizer
        self._wrapper = wrapper
        self._skipped = False
        self.native = steps.skips_itself(optimizer)
        """Whether it skips a step itself where a tensor says so. GradScalers call the others by `always_call`."""
        self.may_nest = steps.may_nest(optimizer)
        self._removed: list[tuple[Tensor, Tensor]] = []
        self._flag: Tensor | None = None
        self._begun = False

    @property
    def loss_scale(self) -> Tensor | None:
        """The loss scale that the gradients are still multiplied by; None if there is none."""
        return steps.loss_scale(self.optimizer)

    def unscale(self) -> None:
        """Divide the gradients by the loss scale, unless that is done: workers may have different scales."""
        scale = self.loss_scale
        if scale is not None:
            divide_all([grad for _, grad in self._with_gradient()], scale)
            steps.clear_loss_scale(self.optimizer)

    def skip_step(self) -> None:
        """Let the step that is about to begin change nothing."""
        self._skipped = True
        for p, grad in self._with_gradient():
            self._removed.append((p, grad))
            p.grad = None

    def skip_step_if(self, flag: Tensor) -> None:
        """Let the step that is about to begin change nothing if the flag is 1.0, without waiting for it."""
        assert self.native
        self._flag = flag
        steps.set_found_inf(self.optimizer, flag)

    @property
    def scaled(self) -> bool:
        """Whether a GradScaler drives this step, and decides about overflows."""
        found = steps.found_inf(self.optimizer)
        return found is not None and found is not self._flag

    def agree(self) -> None:
        """Set `found_inf` from the averaged gradients, which are the same on every worker."""
        if steps.found_inf(self.optimizer) is None:
            return
        sums = [grad.sum() for _, grad in self._with_gradient()]
        if sums:
            finite = torch.stack(sums).isfinite().all()
            steps.set_found_inf(self.optimizer, (~finite).to(torch.float32))

    def begin_step(self) -> None:
        """Skip the update if the GradScaler has found an overflow."""
        self._begun = True
        if self.native:
            return
        found = steps.found_inf(self.optimizer)
        if found is None:
            return
        self.unscale()
        steps.set_found_inf(self.optimizer, None)  # handled here
        if float(found) > 0:
            self.skip_step()

    def end_step(self) -> None:
        """Put the gradients of a skipped step back."""
        if not self._begun:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step(closure) has not called its closure, in which gradients are "
                "averaged and checked. Compute them before: call closure(), then optimizer.step()."
            )
        if self._wrapper is not None:
            report_step(self._wrapper, self._skipped)
        self._begun = self._skipped = False
        if self._removed:
            for p, grad in self._removed:
                p.grad = grad
            self._removed = []
        if self._flag is not None:
            self._flag = None
            steps.set_found_inf(self.optimizer, None)

    def parameters(self) -> Iterator[Tensor]:
        """Yield the parameters that the optimizer holds now."""
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def _with_gradient(self) -> list[tuple[Tensor, Tensor]]:
        return [(p, p.grad) for p in self.parameters() if p.grad is not None]


class LossScale:
    """Brings residuals of gradients to the loss scale of each step, without waiting for the device.

    Under a GradScaler, gradients that are averaged inside backward are multiplied by the loss scale, and so are the
    residuals that error feedback keeps of them. When the scale changes, residuals are multiplied by new / old.
    """

    def __init__(self, scaler: GradScaler, live: LiveModel) -> None:
        self._scaler = scaler
        self._live = live
        self.due = True
        """Whether the next exchange is the first of its step: the scale changes between steps."""

    def rescale(self) -> None:
        """Bring the residuals to the scale of now, before the first exchange of a step."""
        now, self.due = scale_of(self._scaler), False
        if now is None:
            return
        kept = self._live.state.setdefault("loss_scale", {})  # saved with the residuals, dropped with them
        if "scale" in kept:
            rescale_residuals(self._live.state["gradient"], now / kept["scale"].to(now.device))
        kept["scale"] = now.clone()

    def equalise(self, queue: CollectiveQueue) -> None:
        """Set the loss scale of all workers to the smallest: local steps may have made them different."""
        now = scale_of(self._scaler)
        mine = float("inf") if now is None else float(now)
        smallest = float(queue.gather(torch.tensor([mine], dtype=torch.float64)).min())
        if now is not None and smallest != mine:
            self._scaler.update(smallest)


class Clipping:
    """Clips the averaged gradients of each optimizer right before it steps; None clips nothing.

    It is `clip_grad_norm_` at the one place where it means the same on a DDP model, on shards and on a bare module,
    with and without a GradScaler. What the clip cuts is not returned to the residuals of error feedback: then these
    grow as long as gradients are longer than the norm, and training fails (docs/log.md, 2026-11-16).
    """

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
        # 1. the gradients; of a sparse one its numbers, in their own memory
        grads: list[Tensor] = []
        for p in optimizer.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()
                grads.append(p.grad.values())
            elif p.grad is not None:
                grads.append(p.grad)
        if not grads:
            return
        # 2. their norm, over all shards
        norm = torch.nn.utils.get_total_norm(grads)
        sharding = sys.modules.get("torch.distributed.tensor")
        if sharding is not None and isinstance(norm, sharding.DTensor):
            norm = norm.full_tensor()
        if optimizer.loss_scale is not None:
            norm = norm / optimizer.loss_scale.to(norm.device)
        # 3. scaled down
        factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        by_device: dict[torch.device, list[Tensor]] = {}
        for g in map(local_of, grads):
            by_device.setdefault(g.device, []).append(g)
        for device, tensors in by_device.items():
            multiply_all(tensors, factor.to(device))


def run_when_ready(args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[int], None]) -> Arguments | None:
    """Call `ready` with 1 as soon as the gradients of a step are there: now, or at the end of its closure.

    `args` and `kwargs` are those of the step, the optimizer first. Return the new ones if they contain a closure. An
    optimizer that calls it again has computed the gradients anew: then `ready` is called with 2, 3, ... torch's
    optimizers call a closure first, and read gradients only then.
    """
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    if closure is None:
        ready(1)
        return None
    calls = 0

    def evaluate() -> Any:
        nonlocal calls
        loss = closure()
        calls += 1
        ready(calls)
        return loss

    return ((args[0], evaluate, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": evaluate})
