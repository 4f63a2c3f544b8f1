"""The headline, for each way in which runs can end."""

from dataclasses import replace

import laconic
from laconic.tools.compare.judging import headline
from laconic.tools.compare.runs import Outcome, Point
from laconic.tools.units import duration
from tests.tools.compare.outcomes import DDP, LOCAL, LOW_RANK

LOST = replace(LOW_RANK, ended="steps")


def after_steps(outcome: Outcome) -> Outcome:
    return replace(outcome, ended="steps", until_loss=None, steps=50)


def after_a_minute(outcome: Outcome, loss: float) -> Outcome:
    return replace(outcome, ended="seconds", until_loss=None, seconds=60.0, loss_final=loss)


def test_time_to_a_loss():
    assert headline([DDP, LOCAL, LOW_RANK]) == (
        "diloco(period=16) reaches validation loss 2.6 in 12 s over 10mbit: 18 times sooner than ddp(). It sends 23 "
        "times less than ddp()."
    )
    assert headline([DDP]) == "ddp() reaches validation loss 2.6 in 3 min 44 s over 10mbit."
    assert headline([LOW_RANK, LOCAL]).endswith(" in 12 s over 10mbit; no other plan is sooner.")
    assert headline([LOST, LOCAL]) == (
        "post_local_sgd(period=16) reaches validation loss 2.6 in 21 s over 10mbit. diloco(period=16) did not reach it "
        "in 12 s."
    )
    assert headline([LOST]) == "No plan reached validation loss 2.6."
    assert "training loss 2.6" in headline([replace(DDP, loss_of="training")])


def test_time_to_a_loss_beside_the_baselines():
    alone = replace(DDP, plan=laconic.alone(), seconds=18.6, wire_bytes=80, level_bytes={"world": 80})
    free = replace(DDP, without_link=True, link=None, seconds=7.44)
    assert headline([DDP, alone, LOW_RANK, LOCAL, free]) == (
        "diloco(period=16) reaches validation loss 2.6 in 12 s over 10mbit: 1.5 times sooner than alone(), 18 times "
        "sooner than ddp() and 0.60 of the speed of ddp() without a slow link. It sends 23 times less than ddp(). "
        "ddp() and post_local_sgd(period=16) are no better than alone()."
    )
    assert headline([DDP, replace(alone, seconds=9.0), LOW_RANK, free]) == (
        "alone() reaches validation loss 2.6 in 9.0 s over 10mbit; no other plan is sooner. ddp() and "
        "diloco(period=16) are no better than alone()."
    )
    assert headline([alone, LOW_RANK]) == (  # without baselines
        "diloco(period=16) reaches validation loss 2.6 in 12 s over 10mbit: 1.5 times sooner than alone()."
    )


def test_the_same_steps():
    first, fast = after_steps(DDP), after_steps(replace(LOW_RANK, loss_final=2.3))
    assert headline([first, fast]) == (
        "diloco(period=16) takes 12 s for 50 steps, 18 times sooner than ddp(), sends 23 times less, and ends at "
        "a validation loss of 2.300 against 2.292."
    )
    assert headline([fast, replace(fast, seconds=99.0)]) == (
        "diloco(period=16) takes 12 s for 50 steps and ends at a validation loss of 2.300; no other plan is faster."
    )


def test_a_fast_plan_with_a_higher_loss_does_not_win():
    first, fast = after_steps(DDP), after_steps(LOW_RANK)
    assert headline([first, fast]) == (
        "No plan is both faster than ddp() and as good: ddp() takes 3 min 44 s for 50 steps and ends at a validation "
        "loss of 2.292; diloco(period=16) takes 12 s, sends 23 times less, and its loss is 0.048 higher (2.340 against "
        "2.292)."
    )
    slower = replace(after_steps(LOCAL), loss_final=2.3)
    assert headline([first, fast, slower]).startswith("post_local_sgd(period=16) takes 21 s for 50 steps, 11 times")
    assert headline([first, replace(fast, loss_final=float("nan"))]).startswith("No plan is both faster than ddp()")


def test_a_plan_is_judged_beside_workers_that_never_communicate():
    first, fast = after_steps(DDP), after_steps(LOW_RANK)
    alone = replace(fast, plan=laconic.alone(), seconds=5.0, wire_bytes=24, loss_final=2.33)
    assert headline([first, alone, fast]).endswith(
        "its loss is 0.048 higher (2.340 against 2.292). diloco(period=16) is no better than alone()."
    )
    assert headline([first, replace(alone, loss_final=2.492), fast]).endswith(
        "its loss is 0.048 higher (2.340 against 2.292): it keeps 76% of DDP's improvement over no communication."
    )
    assert "sends nothing" in headline([first, replace(alone, loss_final=2.292)])


def test_a_plan_that_ends_lower_keeps_all_and_is_called_lower():
    first, slow = after_steps(DDP), after_steps(replace(LOW_RANK, loss_final=2.286, seconds=400.0))
    alone = replace(slow, plan=laconic.alone(), seconds=5.0, wire_bytes=24, loss_final=2.352)
    assert headline([first, alone, slow]).endswith(
        "its loss is 0.006 lower (2.286 against 2.292): it keeps all of DDP's improvement over no communication."
    )


def seen(outcome: Outcome, losses: list[float]) -> Outcome:
    step_s = outcome.seconds / len(losses)
    points = tuple(Point(10 * i, i * step_s, loss, 0) for i, loss in enumerate(losses, 1))
    return replace(after_steps(outcome), validations=points, loss_final=losses[-1])


def test_baselines_that_differ_by_noise_say_nothing_of_what_plans_keep():
    first = seen(DDP, [3.0, 2.5, 2.3, 2.1, 2.0])
    alone = seen(replace(LOW_RANK, plan=laconic.alone(), wire_bytes=24), [3.02, 2.48, 2.32, 2.08, 2.01])
    fast = seen(LOW_RANK, [3.0, 2.5, 2.3, 2.1, 2.05])
    said = headline([first, alone, fast])
    assert "ddp() and alone() differ by 0.010, which may be noise (their distance scatters by 0.031)" in said
    assert "nothing can be said of what plans keep. Train longer, or with more workers." in said
    assert "it keeps" not in said
    lower = headline([first, replace(alone, loss_final=1.9), fast])
    assert "ddp() ends no lower than alone() (0.100 higher): there is nothing that a plan could keep." in lower
    nan = float("nan")
    for diverged in ([first, replace(alone, loss_final=nan), fast], [after_steps(DDP), seen(alone, [3.0, nan]), fast]):
        assert "differ by" not in headline(diverged) and "it keeps" not in headline(diverged)


def test_how_much_sooner_the_same_loss_was_reached():
    first = seen(replace(DDP, seconds=50.0), [3.0, 2.5, 2.3, 2.1, 2.0])
    near = seen(replace(LOW_RANK, seconds=5.0), [3.2, 2.6, 2.5, 2.3, 2.2])  # 2.2 after 5 s, ddp() after 40
    assert "0.200 higher (2.200 against 2.000); it came to 2.200 8.0 times sooner" in headline([first, near])
    good = seen(replace(LOW_RANK, seconds=5.0), [3.2, 2.6, 2.2, 2.0, 1.9])  # 2.0 after 4 s
    assert headline([first, good]).endswith("1.900 against 2.000; it came to 2.000 12 times sooner.")
    late = seen(replace(LOW_RANK, seconds=45.0), [3.2, 2.9, 2.5, 2.4, 2.35])
    assert "sooner than" not in headline([first, late]) and "it came to" not in headline([first, late])


def test_plans_are_compared_with_ddp_wherever_it_is_in_the_list():
    first, fast = after_steps(DDP), after_steps(replace(LOW_RANK, loss_final=2.3))
    assert headline([fast, first]) == headline([first, fast])
    assert headline([replace(LOW_RANK, loss_final=2.3), DDP]).startswith(
        "diloco(period=16) reaches validation loss 2.6 in 12 s over 10mbit: 18 times sooner than ddp()"
    )


def test_bytes_inside_groups_are_not_counted_as_those_between():
    first, fast = after_steps(DDP), after_steps(replace(LOW_RANK, loss_final=2.3))
    nested = replace(fast, level_bytes={"groups of 2": 255_590_400, "world": 25_559_040}, wire_bytes=281_149_440)
    assert "sends 10 times less between groups" in headline([first, nested])


def test_the_same_seconds():
    assert headline([after_a_minute(DDP, 3.0), after_a_minute(LOW_RANK, 2.34)]) == (
        "In 1 min, diloco(period=16) reaches a validation loss of 2.340, ddp() reaches 3.000; "
        "diloco(period=16) sends 23 times less."
    )
    more = headline([after_a_minute(LOW_RANK, 3.0), replace(after_a_minute(DDP, 2.3), plan=laconic.quantized_ddp())])
    assert more.endswith("quantized_ddp(bits=4) sends 23 times more.")


def test_a_computed_time_is_called_computed():
    assert headline([replace(DDP, clock="computed")]).endswith("The link's time is computed, not measured.")


def test_durations():
    assert [duration(s) for s in (0.04, 9.96, 59.6, 61, 3600)] == ["40 ms", "10 s", "1 min", "1 min 1 s", "60 min"]
