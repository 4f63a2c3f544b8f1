"""How outcomes are judged: against which one, by which loss, and by which bytes. One place for tables and headline."""

import math
from collections.abc import Sequence

from laconic.compare.records import Outcome

AS_GOOD = 0.01
"""A plan is as good as the reference if it has lowered the loss by at least 99% of what the reference has."""
HANDSHAKE_BYTES = 1000
"""`attach` sends less than this. Workers that have sent no more do not communicate in training."""


def reference(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that the others are compared with: that of `ddp()`, wherever it is in the list; else the first."""
    return next((outcome for outcome in outcomes if outcome.plan == "ddp()"), outcomes[0])


def as_good(outcome: Outcome, other: Outcome) -> bool:
    """Whether the final loss of an outcome is as low as that of the reference, within `AS_GOOD`. NaN is not."""
    if not math.isfinite(other.loss_final):
        return math.isfinite(outcome.loss_final)
    tolerance = AS_GOOD * max(0.0, other.loss_start - other.loss_final)
    return outcome.loss_final <= other.loss_final + tolerance


def slow_bytes(outcome: Outcome) -> int:
    """The bytes that a worker sends at the outermost level, which crosses the slowest links."""
    return outcome.level_bytes.get("world", 0) if outcome.level_bytes else outcome.wire_bytes


def has_levels(outcomes: Sequence[Outcome]) -> bool:
    """Whether a plan also sends inside groups of workers."""
    return any(level != "world" for outcome in outcomes for level in outcome.level_bytes)


def never_communicates(outcome: Outcome) -> bool:
    """Whether each worker has trained by itself."""
    return outcome.wire_bytes < HANDSHAKE_BYTES
