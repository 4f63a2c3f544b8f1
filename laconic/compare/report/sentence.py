"""The result of a comparison in one sentence."""

import math
from collections.abc import Sequence

from laconic.compare.judging import as_good, has_levels, never_communicates, reference, slow_bytes
from laconic.compare.records import Outcome
from laconic.compare.units import duration, times


def headline(outcomes: Sequence[Outcome]) -> str:
    """Compare the best plan with the reference, `ddp()`. The best is the fastest of those that are as good."""
    first = reference(outcomes)
    if first.until_loss is not None:
        sentence = _to_target(first, outcomes)
    elif any(outcome.ended == "seconds" for outcome in outcomes):
        sentence = _in_given_time(first, outcomes)
    else:
        sentence = _same_steps(first, outcomes)
    return sentence if first.clock == "measured" else f"{sentence} The link's time is computed, not measured."


def _to_target(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    reached = [outcome for outcome in outcomes if outcome.reached]
    aim = f"loss {first.until_loss:g}"
    if not reached:
        return f"No plan reached {aim}."
    best = min(reached, key=lambda outcome: outcome.seconds)
    reaches = f"{best.plan} reaches {aim} in {duration(best.seconds)}"
    if best is first:
        return f"{reaches}; no other plan is sooner." if len(outcomes) > 1 else f"{reaches}."
    if not first.reached:
        return f"{reaches}; {first.plan} did not reach it in {duration(first.seconds)}."
    sooner = f"{reaches}, {times(first.seconds, best.seconds)} sooner than {first.plan}, and {_less(first, best)}"
    if as_good(best, first) or best.loss_of == "training":
        return f"{sooner}."
    return f"{sooner}; the {best.loss_of} loss of its final weights is {_higher(best, first)}."


def _in_given_time(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    best = min(outcomes, key=_loss)
    reaches = f"In {duration(best.seconds)}, {best.plan} reaches a {best.loss_of} loss of {best.loss_final:.3f}"
    if best is first:
        return f"{reaches}; no other plan reaches a lower loss." if len(outcomes) > 1 else f"{reaches}."
    return f"{reaches}, {first.plan} reaches {first.loss_final:.3f}; {best.plan} {_less(first, best)}."


def _same_steps(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    best = min((each for each in outcomes if as_good(each, first)), key=lambda each: each.seconds, default=first)
    takes = f"{best.plan} takes {duration(best.seconds)} for {best.steps} steps"
    loss = f"a {best.loss_of} loss of {best.loss_final:.3f}"
    if best is not first:
        sooner = f"{times(first.seconds, best.seconds)} sooner than {first.plan}"
        return f"{takes}, {sooner}, {_less(first, best)}, and ends at {loss} against {first.loss_final:.3f}."
    faster = [each for each in outcomes if each.seconds < first.seconds]
    if not faster:
        return f"{takes} and ends at {loss}" + ("; no other plan is faster." if len(outcomes) > 1 else ".")
    return f"No plan is both faster than {first.plan} and as good: {takes} and ends at {loss}; {_worse(faster, first)}."


def _worse(faster: Sequence[Outcome], first: Outcome) -> str:
    """Describe the best of the plans that are faster than the reference, and not as good."""
    communicating = [each for each in faster if not never_communicates(each)]
    near = min(communicating or faster, key=_loss)
    text = f"{near.plan} takes {duration(near.seconds)}, and its loss is {_higher(near, first)}"
    alone = [each for each in faster if never_communicates(each) and each is not near and _loss(each) <= _loss(near)]
    return text + "".join(f", no better than without communication ({each.loss_final:.3f})" for each in alone[:1])


def _higher(outcome: Outcome, first: Outcome) -> str:
    return (
        f"{outcome.loss_final - first.loss_final:.3f} higher ({outcome.loss_final:.3f} against {first.loss_final:.3f})"
    )


def _loss(outcome: Outcome) -> float:
    return outcome.loss_final if math.isfinite(outcome.loss_final) else math.inf


def _less(first: Outcome, best: Outcome) -> str:
    where = " between groups" if has_levels([first, best]) else ""
    by_first, by_best = slow_bytes(first), slow_bytes(best)
    if never_communicates(best) or not by_best:
        return f"sends nothing{where}"
    if by_first >= by_best:
        return f"sends {times(by_first, by_best)} less{where}"
    return f"sends {times(by_best, by_first or 1)} more{where}"
