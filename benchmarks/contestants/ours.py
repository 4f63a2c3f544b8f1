"""laconic: a plan, attached to DDP as the lab's script does it."""

from __future__ import annotations

from dataclasses import replace

import laconic
from contestants.contract import Host, Training, every_few_steps


def attached(host: Host, plan: str) -> Training:
    """Train with a plan. Validation waits while a fragment is in flight, which would travel while the clock stands."""
    model, training = host.ddp()
    session = laconic.attach(laconic.plan(plan), model, training.inner)
    late = False

    def is_due(step: int) -> bool:
        nonlocal late
        if not (late or every_few_steps(step)):
            return False
        late = session.in_flight and not late
        return not late

    return replace(training, is_due=is_due, close=session.detach)
