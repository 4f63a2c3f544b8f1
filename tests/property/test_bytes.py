"""What the ledger has of a plan is what `laconic.sent_bytes` says that it sends."""

from __future__ import annotations

from typing import Any

import pytest

import laconic
from tests.property.machine import Training
from tests.property.plans import DEFAULTS, PLANS
from tests.property.pool import Pool
from tests.property.programs import Setup, StepOptions
from tests.property.trainer import Report


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", DEFAULTS)
def test_the_ledger_has_the_bytes_that_are_planned(plan):
    steps, workers = PLANS[plan].plan.schedule.period, 3
    before = _call(workers, "attach", setup=Setup(plan, workers, features=frozenset({"wide"})))
    for number in range(1, steps):
        _call(workers, "step", number=number, options=StepOptions())
    reports = _call(workers, "step", number=steps, options=StepOptions())
    _call(workers, "detach")
    shapes = {name: t.shape for name, t in reports[0].weights.items()}
    planned = steps * laconic.sent_bytes(PLANS[plan].plan, shapes, workers)
    sent = [_of_plan(report) - _of_plan(first) for report, first in zip(reports, before, strict=True)]
    assert sent[0] == planned
    assert sent == pytest.approx([planned] * workers, rel=0.06)  # the others own a row of a bucket more or less


def _call(workers: int, operation: str, **arguments: Any) -> list[Any]:
    replies = Training.pools.setdefault(workers, Pool(workers)).call(operation, **arguments)
    assert {reply.error for reply in replies} == {""}, replies
    return [reply.value for reply in replies]


def _of_plan(report: Report) -> int:
    """Return the bytes that are no headers and no buffers."""
    return report.bytes_of.get("gradient", 0) + report.bytes_of.get("weights", 0)
