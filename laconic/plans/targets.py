"""Plans that are named by a target of bytes, and become plans of ranks or periods when the model is known.

    plan = frugal(bytes="60x")      # prints as this
    plan.resolved(facts)            # streaming_diloco(period=4, fragments=4, delay=0), of a model of large tensors

`attach`, `session.change`, `sent_bytes` and the planner resolve a plan before they use it. What it becomes depends on
`ModelFacts` alone, which all workers share. The rules are in `rules.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor

from laconic.plans.plan import Plan

Kind: TypeAlias = Literal["adaptive", "sgd", "muon"]
"""How an optimizer scales gradients: each number by its own history, as Adam does; not at all; or matrices as a whole.
"""


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What a target of bytes is resolved from: what is trained, by what, among how many workers.

    `tensors` are the trained tensors, `buffers` all buffers, both without memory. `bytes_of` is what a worker sends at
    a step under a plan, on average.
    """

    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizers: tuple[Kind, ...]
    workers: int
    bytes_of: Callable[[Plan], float]

    @property
    def ddp_bytes(self) -> int:
        """What `ddp()` sends at a step in fp32: targets count from it."""
        return 8 * (self.workers - 1) * sum(t.numel() for t in self.tensors.values()) // self.workers

    def times(self, plan: Plan) -> float:
        """Return how many times fewer bytes than `ddp()` in fp32 a plan sends."""
        sent = self.bytes_of(plan)
        return self.ddp_bytes / sent if sent else float("inf")


@dataclass(frozen=True, repr=False)
class TargetPlan(Plan):
    """A plan that `choose` finds when the model is known. Until then, schedule and codec are those of large tensors.

    It prints as `call`, and equals a plan of the same call.
    """

    call: str = ""
    choose: Callable[[ModelFacts], Plan] = field(default=lambda facts: Plan(), compare=False)

    def resolved(self, facts: ModelFacts) -> Plan:
        """Return the plan that meets the target on this model."""
        if facts.ddp_bytes == 0:  # nothing is trained
            return Plan(self.schedule, self.codec, topology=self.topology)
        return self.choose(facts)

    def __repr__(self) -> str:
        return self.call


def width_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the width of a model: the mean of the smaller sides of its matrices, by their numbers.

    >>> import torch
    >>> width_of({"up": torch.empty(512, 128), "bias": torch.empty(512)})
    128.0
    """
    matrices = [t for t in tensors.values() if t.dim() > 1 and t.numel()]
    numbers = sum(t.numel() for t in matrices)
    logs = (t.numel() * math.log2(min(t.shape[0], t[0].numel())) for t in matrices)
    return 2 ** (sum(logs) / numbers) if numbers else 1.0
