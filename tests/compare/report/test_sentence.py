"""The headline, for each way in which runs can end."""

from dataclasses import replace

from laconic.compare.records import Outcome
from laconic.compare.report import headline
from laconic.compare.units import duration
from tests.compare.report.outcomes import DDP, LOCAL, LOW_RANK

LOST = replace(LOW_RANK, ended="steps")


def after_steps(outcome: Outcome) -> Outcome:
    return replace(outcome, ended="steps", until_loss=None, steps=50)


def after_a_minute(outcome: Outcome, loss: float) -> Outcome:
    return replace(outcome, ended="seconds", until_loss=None, seconds=60.0, loss_final=loss)


def test_time_to_a_loss():
    assert headline([DDP, LOCAL, LOW_RANK]) == (
        "power_sgd(rank=4) reaches loss 2.6 in 12 s, 18 times sooner than ddp(), and sends 23 times less."
    )
    assert headline([LOW_RANK, DDP]) == "power_sgd(rank=4) reaches loss 2.6 in 12 s; no other plan is sooner."
    assert headline([DDP]) == "ddp() reaches loss 2.6 in 3 min 44 s."
    assert headline([LOST, LOCAL]) == (
        "post_local_sgd(period=16) reaches loss 2.6 in 21 s; power_sgd(rank=4) did not reach it in 12 s."
    )
    assert headline([LOST]) == "No plan reached loss 2.6."


def test_the_same_steps():
    first, fast = after_steps(DDP), after_steps(LOW_RANK)
    assert headline([first, fast]) == (
        "power_sgd(rank=4) takes 12 s for 50 steps, 18 times sooner than ddp(), sends 23 times less, and ends at "
        "a validation loss of 2.340 against 2.292."
    )
    assert headline([fast, first]) == (
        "power_sgd(rank=4) takes 12 s for 50 steps and ends at a validation loss of 2.340; no other plan is faster."
    )
    assert "sends nothing" in headline([first, replace(fast, sent_bytes=0)])


def test_the_same_seconds():
    assert headline([after_a_minute(DDP, 3.0), after_a_minute(LOW_RANK, 2.34)]) == (
        "In 1 min, power_sgd(rank=4) reaches a validation loss of 2.340, ddp() reaches 3.000; "
        "power_sgd(rank=4) sends 23 times less."
    )
    more = headline([after_a_minute(LOW_RANK, 3.0), after_a_minute(DDP, 2.3)])
    assert more.endswith("ddp() sends 23 times more.")


def test_a_computed_time_is_called_computed():
    assert headline([replace(DDP, clock="computed")]).endswith("The link's time is computed, not measured.")


def test_durations():
    assert [duration(s) for s in (0.04, 9.96, 59.6, 61, 3600)] == ["0.0 s", "10.0 s", "1 min", "1 min 1 s", "60 min"]
