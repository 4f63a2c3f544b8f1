"""What a plan keeps of DDP's improvement, and its efficiency: cases computed by hand."""

import json
import math
from dataclasses import replace

import pytest

import laconic
from laconic.tools.compare.judging import as_json, efficiency, kept, kept_fraction, no_better_than_alone, reference
from laconic.tools.compare.records import Outcome, Point
from tests.tools.compare.report.outcomes import DDP as OVER_LINK

NAN = math.nan


def after_steps(plan: str, loss: float, steps: int = 50) -> Outcome:
    return replace(
        OVER_LINK, plan=laconic.plan(plan), loss_final=loss, ended="steps", until_loss=None, link=None, steps=steps
    )


def to_target(plan: str, seconds: float, reached: bool = True, without_link: bool = False) -> Outcome:
    ended = replace(
        OVER_LINK, plan=laconic.plan(plan), seconds=seconds, ended="loss" if reached else "steps", steps=round(seconds)
    )
    return replace(ended, without_link=without_link, link=None if without_link else "10mbit", curve=())


@pytest.mark.parametrize(
    ("alone", "plan", "ddp", "fraction"),
    [
        (2.0, 1.7, 1.5, 0.6),
        (2.0, 1.5, 1.5, 1.0),
        (2.0, 1.4, 1.5, 1.2),  # better than ddp()
        (2.0, 2.0, 1.5, 0.0),
        (2.0, 2.5, 1.5, -1.0),
        (1.5, 1.5, 1.5, None),  # DDP is no improvement
        (1.5, 1.4, 1.6, None),  # it is even worse
        (NAN, 1.7, 1.5, None),
        (2.0, 1.7, NAN, None),
        (math.inf, 1.7, 1.5, None),
    ],
)
def test_the_fraction_that_is_kept(alone: float, plan: float, ddp: float, fraction: float | None) -> None:
    assert kept_fraction(alone, plan, ddp) == fraction


def test_a_plan_that_diverged_keeps_nothing_that_can_be_counted() -> None:
    share = kept_fraction(2.0, NAN, 1.5)
    assert share is not None and math.isnan(share)


DDP, ALONE = after_steps("ddp()", 1.5), after_steps("alone()", 2.0)
GOOD, BAD, LOST = after_steps("diloco()", 1.6), after_steps("quantized_ddp()", 2.1), after_steps("sparse_loco()", NAN)


def test_after_the_same_steps() -> None:
    outcomes = [GOOD, DDP, ALONE, BAD, LOST]
    assert [kept(each, outcomes) for each in outcomes[:4]] == [0.8, 1.0, 0.0, -0.2]
    assert [no_better_than_alone(each, outcomes) for each in outcomes] == [False, False, False, True, True]
    assert [efficiency(each, outcomes) for each in outcomes] == [None] * 5  # there is no target
    rows = json.loads(as_json(outcomes))
    assert [row["kept"] for row in rows] == [0.8, 1.0, 0.0, -0.2, None]
    assert [row["no_better_than_alone"] for row in rows] == [False, False, False, True, True]


def test_without_a_baseline() -> None:
    assert kept(GOOD, [GOOD, DDP]) is None
    assert kept(GOOD, [GOOD, ALONE]) is None
    assert not no_better_than_alone(BAD, [BAD, DDP])
    assert no_better_than_alone(BAD, [BAD, ALONE])
    diverged = replace(ALONE, loss_final=NAN)
    assert kept(GOOD, [DDP, diverged, GOOD]) is None
    assert not no_better_than_alone(GOOD, [DDP, diverged, GOOD])


def test_runs_of_different_lengths_are_compared_at_the_last_step_that_all_have() -> None:
    def validated(plan: str, losses: dict[int, float]) -> Outcome:
        points = tuple(Point(step, float(step), loss, 0) for step, loss in losses.items())
        return replace(after_steps(plan, 1.0, steps=max(losses)), validations=points)

    ddp = validated("ddp()", {5: 2.0, 10: 1.5})
    alone = validated("alone()", {5: 2.5, 10: 2.0, 15: 1.9, 20: 1.5})
    plan = validated("frugal()", {5: 2.4, 10: 1.7, 15: 1.5})
    assert kept(plan, [ddp, alone, plan]) == 0.6
    assert kept(validated("frugal()", {7: 1.0}), [ddp, alone]) is None
    bad = validated("quantized_ddp()", {5: 2.0, 10: 1.9, 15: 1.95})  # lower than alone at first, and not at the end
    assert no_better_than_alone(bad, [ddp, alone, bad])


def test_time_to_a_target_over_a_link() -> None:
    free = to_target("ddp()", 6.0, without_link=True)
    ddp, alone = to_target("ddp()", 240.0), to_target("alone()", 20.0)
    plan, late, never = (
        to_target("frugal()", 10.0),
        to_target("quantized_ddp()", 20.0),
        to_target("power_sgd()", 9.0, reached=False),
    )
    outcomes = [free, ddp, alone, plan, late, never]
    assert reference(outcomes) is ddp
    assert [efficiency(each, outcomes) for each in outcomes] == [1.0, 0.025, 0.3, 0.6, 0.3, 0.0]
    assert [no_better_than_alone(each, outcomes) for each in outcomes] == [False, True, False, False, True, True]
    assert efficiency(plan, [ddp, alone, plan]) is None  # ddp() has run over the slow link alone
    assert efficiency(plan, [replace(free, ended="steps"), ddp, plan]) is None


def test_where_alone_never_reaches_the_target() -> None:
    ddp, alone = to_target("ddp()", 240.0), to_target("alone()", 20.0, reached=False)
    assert not no_better_than_alone(ddp, [ddp, alone])
    both = [to_target("frugal()", 50.0, reached=False), alone]
    assert not no_better_than_alone(both[0], both)  # neither does, and they have no step in common


def test_without_a_link_ddp_is_its_own_ceiling() -> None:
    runs = [replace(to_target(plan, seconds), link=None) for plan, seconds in (("ddp()", 6.0), ("frugal()", 8.0))]
    assert [efficiency(each, runs) for each in runs] == [1.0, 0.75]


def test_in_the_same_time_the_final_losses_decide() -> None:
    ddp, alone, plan = (replace(each, ended="seconds") for each in (DDP, ALONE, GOOD))
    assert not no_better_than_alone(plan, [ddp, alone, plan])
    assert no_better_than_alone(replace(plan, loss_final=2.0), [ddp, alone])
