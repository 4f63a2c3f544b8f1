"""The measured front: what share of the gain of talking each plan keeps, and where that was measured.

kept = (alone - plan) / (alone - ddp), of the validation loss after equal steps (docs/quality.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf

from laconic.plans.plan import Plan
from laconic.plans.text import plan as parse

SOURCE = "docs/quality.md: GPT of 10.7 M parameters, 4 workers, 600 steps, AdamW, mean of 3 seeds, one H200"
MEASURED_PARAMETERS = 10_700_000
MEASURED_WORKERS = 4
MEASURED_STEPS = 600


@dataclass(frozen=True)
class Measured:
    """One plan of the front."""

    plan: str
    fewer: float
    """Times fewer bytes than `ddp()`."""
    kept: float
    seeds: int = 3


FRONT = (
    Measured("ddp()", 1.0, 1.0),
    Measured("quantized_ddp(bits=4)", 7.8, 0.98),
    Measured("frugal(bytes='30x')", 30, 0.83),
    Measured("frugal(bytes='60x')", 60, 0.85),
    Measured("power_sgd(rank=32, bits=4)", 69, 0.82),
    Measured("frugal(bytes='120x')", 120, 0.80),
    Measured("diloco(period=16)", 244, 0.69),
    Measured("streaming_diloco(period=16)", 243, 0.62),  # with mix=0.5, which keeps less than the default
    Measured("sparse_loco(period=4)", 151, 0.72, seeds=1),
    Measured("post_local_sgd(period=16)", 16, 0.68, seeds=1),
    Measured("alone()", inf, 0.0),
)
"""Without what other plans of the front beat in both bytes and loss, but for the defaults of the named plans."""
PLANS = tuple(each.plan for each in FRONT[:7])
"""What the planner compares if no plan is given."""


def measured(plan: Plan) -> Measured | None:
    """Return what was measured of a plan, None if it was not."""
    return next((each for each, known in _parsed() if known == plan), None)


@cache
def _parsed() -> list[tuple[Measured, Plan]]:
    return [(each, parse(each.plan)) for each in FRONT]
