"""laconic: a plan, attached to DDP as the lab's script does it."""

from __future__ import annotations

from dataclasses import replace

import laconic
from contestants.contract import Host, Training
from laconic.tools.compare.runs import VALIDATE_EVERY


def attached(host: Host, plan: str) -> Training:
    """Train with a plan.

    As in `laconic compare`, validation waits for five steps at most while a fragment is in flight, which would travel
    while the clock stands still.
    """
    model, training = host.ddp()
    session = laconic.attach(laconic.plan(plan), model, training.inner)
    last = 0

    def is_due(step: int) -> bool:
        nonlocal last
        waits = session.in_flight and step - last < 2 * VALIDATE_EVERY
        if step - last < VALIDATE_EVERY or waits:
            return False
        last = step
        return True

    return replace(training, is_due=is_due, close=session.detach)
