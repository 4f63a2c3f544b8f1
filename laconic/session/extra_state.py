"""What is synchronised beside weights: buffers, such as BatchNorm's statistics, and the optimizers' moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Exchange, Mean
from laconic.plans.plan import Plan
from laconic.session.model_state import ModelState, local_of


class ExtraState:
    """Buffers and optimizer state of one model."""

    def __init__(self, model_state: ModelState, optimizers: Sequence[Optimizer]) -> None:
        self._model_state = model_state
        self._optimizers = list(optimizers)

    def of(self, plan: Plan) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
        """Return the buffers and this worker's moments that the plan averages."""
        buffers = dict(self._model_state.buffers) if plan.buffers == "average" else {}
        return buffers, self.moments() if plan.optimizer_state == "average" else {}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return this worker's moments by parameter: what has its shape."""
        found: dict[str, dict[str, Tensor]] = {name: {} for name in self._model_state.originals}
        for name, p in self._model_state.originals.items():
            for optimizer in self._optimizers:
                state = optimizer.state.get(p, {})
                like = {k: local_of(t) for k, t in state.items() if isinstance(t, Tensor) and t.shape == p.shape}
                found[name] |= {f"moment:{k}:{name}": t for k, t in like.items() if t.is_floating_point()}
        return found

    def common(
        self, moments: Mapping[str, Mapping[str, Tensor]], queue: CollectiveQueue, reset_others: bool = False
    ) -> dict[str, Tensor]:
        """Return the moments of parameters that have them on every worker; perhaps drop the state of the others."""
        here = torch.tensor([float(bool(moments[name])) for name in moments])
        if queue.workers > 1 and len(moments):
            here = queue.run(_mean(here.to(queue.device)), "control")
        everywhere = [name for name, share in zip(moments, here.tolist(), strict=True) if share == 1]
        if reset_others:
            self.reset_optimizers(moments.keys() - set(everywhere))
        return flat({name: moments[name] for name in everywhere})

    def equal_counters(self, queue: CollectiveQueue) -> None:
        """Set counters in the optimizers' state, such as Adam's steps, to the largest. Every worker has all of them."""
        params = [p for p in self._model_state.originals.values() if p.dim()]
        states = [optimizer.state.get(p, {}) for p in params for optimizer in self._optimizers]
        counters = [t for state in states for t in state.values() if isinstance(t, Tensor) and t.dim() == 0]
        if counters:
            rows = queue.gather(torch.tensor([float(t) for t in counters], dtype=torch.float64))
            for t, value in zip(counters, rows.amax(0).tolist(), strict=True):
                t.fill_(value)

    def reset_optimizers(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of these parameters."""
        for name in names:
            for optimizer in self._optimizers:
                if self._model_state.originals[name] in optimizer.state:
                    optimizer.state[self._model_state.originals[name]].clear()


def flat(moments: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the moments of all parameters."""
    return {key: t for each in moments.values() for key, t in each.items()}


def _mean(x: Tensor) -> Exchange[Tensor]:
    return (yield Mean(x))
