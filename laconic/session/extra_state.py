"""What is synchronised beside weights: buffers, such as BatchNorm's statistics, and the optimizers' moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.queue import CollectiveQueue
from laconic.comm.requests import Averaged, Exchange, Mean, true
from laconic.plans.plan import Plan
from laconic.session.model_state import ModelState, local_of


class ExtraState:
    """Buffers and optimizer state of one model."""

    def __init__(self, model_state: ModelState, optimizers: Sequence[Optimizer]) -> None:
        self._model_state = model_state
        self._optimizers = list(optimizers)

    def buffers(self, plan: Plan) -> dict[str, Tensor]:
        """Return the buffers that are averaged."""
        return dict(self._model_state.buffers) if plan.buffers == "average" else {}

    def moments(self, plan: Plan) -> dict[str, dict[str, Tensor]]:
        """Return this worker's moments that may be averaged, by parameter: those of its shape."""
        if plan.optimizer_state != "average":
            return {}
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self._model_state.originals}
        for name, p in self._model_state.originals.items():
            for optimizer in self._optimizers:
                state = optimizer.state.get(p, {})
                like = {k: local_of(t) for k, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape}
                found[name] |= {f"moment:{k}:{name}": t for k, t in like.items() if t.is_floating_point()}
        return found

    @staticmethod
    def common(moments: Mapping[str, Mapping[str, Tensor]], queue: CollectiveQueue) -> dict[str, Tensor]:
        """Return the moments of parameters that have them on every worker."""
        here = torch.tensor([float(bool(moments[name])) for name in moments])
        if queue.workers > 1 and len(moments):
            here = queue.run(_mean(here.to(queue.device)), "control").mean[""]
        everywhere = [name for name, share in zip(moments, here.tolist(), strict=True) if share == 1]
        return {key: t for name in everywhere for key, t in moments[name].items()}

    def reset_optimizers(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of these parameters."""
        for name in names:
            for optimizer in self._optimizers:
                if self._model_state.originals[name] in optimizer.state:
                    optimizer.state[self._model_state.originals[name]].clear()


def _mean(x: Tensor) -> Exchange:
    return Averaged({"": (yield Mean(x))}, dict, true)
