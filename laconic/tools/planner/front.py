"""The plans that are compared, measured and chosen from where none is named."""

from __future__ import annotations

from laconic.plans.methods import ddp, diloco, frugal, power_sgd, quantized_ddp
from laconic.plans.plan import Plan

PLANS: tuple[Plan, ...] = (
    *(
        ddp(),
        ddp("bf16"),
        quantized_ddp(bits=4),
        frugal("30x"),
        frugal("60x"),
        power_sgd(rank=32, bits=4),
        frugal("120x"),
    ),
    diloco(period=16),
)
"""What each keeps of a training is predicted by `quality.py`."""
