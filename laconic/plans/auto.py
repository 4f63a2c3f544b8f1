"""`auto()`: the plan that measures the network, and then chooses another one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.plans.methods import power_sgd
from laconic.plans.plan import Plan


@dataclass(frozen=True, repr=False)
class AutoPlan(Plan):
    """Begins as `power_sgd()`, which sends little and keeps the workers equal, until its observer can choose."""

    observer: ClassVar[str] = "laconic.tools.planner.auto:observer"

    def __repr__(self) -> str:
        return "auto()"


def auto() -> Plan:
    """Measure the network for a few seconds, and go on with the plan of the measured front that fits it.

    Which one is chosen, and why, is logged; `session.change(plan)` overrules it. docs/plan.md has the rule.

    >>> auto()
    auto()
    """
    start = power_sgd()
    return AutoPlan(start.schedule, start.codec)
