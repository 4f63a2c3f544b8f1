"""The measured front: the fraction of DDP's improvement over no communication that each plan keeps.

kept = (alone - plan) / (alone - ddp), of the validation loss after equal steps (docs/quality.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.plans.methods import (
    alone,
    ddp,
    diloco,
    frugal,
    post_local_sgd,
    power_sgd,
    quantized_ddp,
    sparse_loco,
    streaming_diloco,
)
from laconic.plans.plan import Plan

SOURCE = "docs/quality.md: GPT of 10.7 M parameters, 4 workers, 600 steps, AdamW, mean of 3 seeds, one H200"
MEASURED_PARAMETERS = 10_700_000


@dataclass(frozen=True)
class Measured:
    """What one plan keeps, and over how many seeds it was measured."""

    plan: Plan
    kept: float
    seeds: int = 3


FRONT = (
    Measured(ddp(), 1.0),
    Measured(quantized_ddp(bits=4), 0.98),
    Measured(frugal("30x"), 0.83),
    Measured(frugal("60x"), 0.85),
    Measured(power_sgd(rank=32, bits=4), 0.82),
    Measured(frugal("120x"), 0.80),
    Measured(diloco(period=16), 0.69),
    Measured(streaming_diloco(period=16, mix=0.5), 0.62),  # the default, mix=None, was not measured on this model
    Measured(sparse_loco(period=4), 0.72, seeds=1),
    Measured(post_local_sgd(period=16), 0.68, seeds=1),
    Measured(alone(), 0.0),
)
"""Without what other plans of the front beat in both bytes and loss, but for the defaults of the named plans."""
PLANS = tuple(each.plan for each in FRONT[:7])
"""What the planner compares if no plan is given."""


def measured(plan: Plan) -> Measured | None:
    """Return what was measured of a plan, None if it was not."""
    return next((each for each in FRONT if each.plan == plan), None)
