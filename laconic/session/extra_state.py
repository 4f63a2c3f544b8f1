"""What is synchronised beside weights: buffers, such as BatchNorm's statistics, and the optimizers' moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Gather, Mean, true
from laconic.plans.plan import Plan
from laconic.session.model_state import ModelState, local_of


class ExtraState:
    """Buffers and optimizer state of one model."""

    def __init__(self, model_state: ModelState, optimizers: Sequence[Optimizer]) -> None:
        self._model_state = model_state
        self._optimizers = list(optimizers)

    def averaged(self, plan: Plan, queue: CollectiveQueue) -> dict[str, Tensor]:
        """Return what is averaged besides weights, as the plan has it."""
        buffers = dict(self._model_state.buffers) if plan.buffers == "average" else {}
        return buffers | self._moments(queue) if plan.optimizer_state == "average" else buffers

    def _moments(self, queue: CollectiveQueue) -> dict[str, Tensor]:
        """Return the moments of parameters that have them on every worker."""
        found: dict[str, dict[str, Tensor]] = {}
        for name, p in self._model_state.originals.items():
            for optimizer in self._optimizers:
                state = optimizer.state.get(p, {})
                like = {k: local_of(t) for k, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape}
                found.setdefault(name, {}).update({f"moment:{key}:{name}": t for key, t in like.items()})
        here = torch.tensor([float(bool(found[name])) for name in found])
        if queue.workers > 1:
            here = queue.run(_mean(here.to(queue.device)), "control").mean[""]
        everywhere = [name for name, share in zip(found, here.tolist(), strict=True) if share == 1]
        return {key: t for name in everywhere for key, t in found[name].items() if t.is_floating_point()}

    def reset_optimizers(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of these parameters."""
        for name in names:
            for optimizer in self._optimizers:
                if self._model_state.originals[name] in optimizer.state:
                    optimizer.state[self._model_state.originals[name]].clear()


def _mean(x: Tensor) -> Exchange:
    return Averaged({"": (yield Mean(x))}, dict, true)


def of_first_worker(tensors: Mapping[str, Tensor]) -> Exchange:
    """Gather from all workers, and keep the tensors of the first."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    rows = yield Gather(flat)
    parts = rows[0].split([t.numel() for t in tensors.values()])
    mean = {name: part.view(t.shape) for (name, t), part in zip(tensors.items(), parts, strict=True)}
    return Averaged(mean, dict, true)
