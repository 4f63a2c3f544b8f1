"""The plans that are compared, measured and chosen from where none is named."""

from __future__ import annotations

from laconic.plans.methods import Group, ddp, diloco, frugal, power_sgd, quantized_ddp, streaming_diloco
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
    streaming_diloco(),
)
"""What each keeps of a training is predicted by `quality.py`."""


def plans_of(group: Group) -> tuple[Plan, ...]:
    """Return the front; where workers share links in groups, with its local plans between these groups, too."""
    between = (*(frugal(each, group=group) for each in ("30x", "60x", "120x")), diloco(period=16, group=group))
    return PLANS if group is None else (*PLANS, *between)
