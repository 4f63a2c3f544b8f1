"""What a plan keeps of DDP's improvement, and its efficiency: cases computed by hand."""

import json
import math
from dataclasses import replace

import pytest

import laconic
from laconic.tools.compare.judging import (
    as_json,
    efficiency,
    final_gap,
    gap_noise,
    kept,
    kept_fraction,
    no_better_than_alone,
    reference,
    seconds_to,
)
from laconic.tools.compare.runs import Outcome, Point
from tests.tools.compare.outcomes import DDP as OVER_LINK

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


def with_curve(outcome: Outcome, losses: list[float]) -> Outcome:
    points = tuple(Point(5 * i, float(i), loss, 0) for i, loss in enumerate(losses, 1))
    return replace(outcome, validations=points, loss_final=losses[-1], steps=5 * len(losses))


def test_a_gap_that_is_not_larger_than_its_noise_says_nothing_of_what_is_kept() -> None:
    ddp = with_curve(DDP, [3.0, 2.5, 2.2, 2.0, 1.9])
    plan = with_curve(GOOD, [3.0, 2.5, 2.2, 2.0, 1.92])
    steady = with_curve(ALONE, [3.01, 2.52, 2.23, 2.04, 1.95])  # a distance that grows by 0.01 each time
    assert gap_noise([ddp, steady]) == pytest.approx(0.0, abs=1e-9)
    assert kept(plan, [ddp, steady, plan]) == pytest.approx(0.6)
    noisy = with_curve(ALONE, [3.02, 2.48, 2.22, 1.98, 1.95])  # distances of 0.02, -0.02, 0.02, -0.02, 0.05
    noise = math.sqrt((0.04**2 + 0.04**2 + 0.055**2) / 3 / 1.5)
    assert gap_noise([ddp, noisy]) == pytest.approx(noise)
    assert [kept(each, [ddp, noisy, plan]) for each in (ddp, noisy, plan)] == [None] * 3
    gap = final_gap([ddp, noisy, plan])
    assert gap is not None and gap.loss == pytest.approx(0.05) and not gap.clear
    far = with_curve(ALONE, [3.02, 2.48, 2.22, 1.98, 2.4])  # the same at first, and far at the end
    assert gap_noise([ddp, far]) == pytest.approx(math.sqrt((2 * 0.04**2 + (-0.02 - 0.26) ** 2) / 3 / 1.5))
    assert gap_noise([ddp]) is None and gap_noise([with_curve(DDP, [2.0, 1.9]), steady]) is None


def test_training_losses_are_means_that_overlap_so_every_eighth_is_taken() -> None:
    steps = range(1, 33)
    ddp = replace(DDP, curve=tuple(Point(i, float(i), 2.0, 0) for i in steps))
    alone = replace(ALONE, curve=tuple(Point(i, float(i), 2.0 + 0.1 * (i == 16), 0) for i in steps))
    assert gap_noise([ddp, alone]) == pytest.approx(math.sqrt((0.1**2 + 0.05**2) / 2 / 1.5))


def test_when_a_loss_was_first_seen() -> None:
    run = with_curve(DDP, [3.0, 2.5, 2.6, 2.0])
    assert [seconds_to(run, loss) for loss in (3.5, 2.55, 2.0, 1.0)] == [1.0, 2.0, 4.0, None]
    assert seconds_to(replace(run, validations=(), curve=()), 9.0) is None


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
