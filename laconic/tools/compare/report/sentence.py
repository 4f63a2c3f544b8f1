"""The result of a comparison in one or two sentences."""

import math
from collections.abc import Sequence

from laconic.plans.methods import alone
from laconic.tools.compare.judging import (
    Gap,
    as_good,
    efficiency,
    final_gap,
    has_levels,
    kept,
    no_better_than_alone,
    reference,
    seconds_to,
    slow_bytes,
    without_communication,
)
from laconic.tools.compare.records import Outcome
from laconic.tools.units import duration, listed, times


def headline(outcomes: Sequence[Outcome]) -> str:
    """Compare the best plan with `ddp()` and `alone()`, and name the plans that are no better than the latter."""
    first = reference(outcomes)
    compared = [each for each in outcomes if not each.without_link]
    if first.until_loss is not None:
        sentence = _to_target(first, compared, outcomes)
    elif any(outcome.ended == "seconds" for outcome in compared):
        sentence = _in_given_time(first, compared)
    else:
        sentence = _same_steps(first, compared)
    gap = final_gap(outcomes)
    if gap is not None and math.isfinite(gap.loss) and not gap.clear and first.until_loss is None:
        sentence += f" {_unclear(gap)}"
    useless = [f"{each.plan}" for each in compared if no_better_than_alone(each, outcomes)]
    if useless:
        sentence += f" {listed(useless)} {'is' if len(useless) == 1 else 'are'} no better than alone()."
    return sentence if first.clock == "measured" else f"{sentence} The link's time is computed, not measured."


def _to_target(first: Outcome, compared: Sequence[Outcome], outcomes: Sequence[Outcome]) -> str:
    reached = [outcome for outcome in compared if outcome.reached]
    aim = f"{first.loss_of} loss {first.until_loss:g}"
    if not reached:
        return f"No plan reached {aim}."
    best = min(reached, key=lambda outcome: outcome.seconds)
    over = "" if first.link is None else f" over {first.link}"
    reaches = f"{best.plan} reaches {aim} in {duration(best.seconds)}{over}"
    floor, speed = without_communication(compared), efficiency(best, outcomes)
    if best in (first, floor):
        return f"{reaches}; no other plan is sooner." if len(compared) > 1 else f"{reaches}."
    others = [first] if floor in (None, first) else [floor, first]
    said = [f"{times(each.seconds, best.seconds)} sooner than {each.plan}" for each in others if each.reached]
    if speed is not None and first.link is not None:
        said.append(f"{speed:.2f} of the speed of ddp() without a slow link")
    said = [f"{reaches}: {listed(said)}." if said else f"{reaches}."]
    said += [f"{each.plan} did not reach it in {duration(each.seconds)}." for each in others if not each.reached]
    if first.reached and first is not floor:
        said.append(f"It {_less(first, best)} than {first.plan}.")
    return " ".join(said)


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
        ends = f"ends at {loss} against {first.loss_final:.3f}"
        return f"{takes}, {sooner}, {_less(first, best)}, and {ends}{_same_loss(best, first)}."
    rest = [each for each in outcomes if each is not first and each.plan != alone()]
    faster = any(each.seconds < first.seconds for each in rest)
    near = min((each for each in rest if slow_bytes(each) < slow_bytes(first)), key=_loss, default=None)
    none = f"No plan is both faster than {first.plan} and as good: " if faster else ""
    if near is not None and (faster or kept(near, outcomes) is not None):
        return f"{none}{takes} and ends at {loss}; {_worse(near, first, outcomes)}."
    return f"{none}{takes} and ends at {loss}" + ("; no other plan is faster." if rest and not faster else ".")


def _worse(near: Outcome, first: Outcome, outcomes: Sequence[Outcome]) -> str:
    """Describe the best of the plans that are not as good as the reference."""
    text = f"{near.plan} takes {duration(near.seconds)}, {_less(first, near)}, and its loss is {_beside(near, first)}"
    text += _same_loss(near, first)
    share = kept(near, outcomes)
    if share is None or not share > 0:
        return text
    how_much = "all" if share >= 1 else f"{share:.0%}"
    return f"{text}: it keeps {how_much} of DDP's improvement over no communication"


def _same_loss(outcome: Outcome, first: Outcome) -> str:
    """How much sooner a run came to the same loss, the higher of the two final ones, where the curves tell it."""
    loss = max(outcome.loss_final, first.loss_final)
    ours, theirs = seconds_to(outcome, loss), seconds_to(first, loss)
    if ours is None or theirs is None or theirs <= ours:
        return ""
    return f"; it came to {loss:.3f} {times(theirs, ours)} sooner"


def _unclear(gap: Gap) -> str:
    """Say why nothing is known of what plans keep."""
    if gap.loss <= 0:
        return f"ddp() ends no lower than alone() ({-gap.loss:.3f} higher): there is nothing that a plan could keep."
    return (
        f"ddp() and alone() differ by {gap.loss:.3f}, which may be noise (their distance scatters by {gap.noise:.3f}): "
        "nothing can be said of what plans keep. Train longer, or with more workers."
    )


def _beside(outcome: Outcome, first: Outcome) -> str:
    more = outcome.loss_final - first.loss_final
    losses = f"({outcome.loss_final:.3f} against {first.loss_final:.3f})"
    if f"{abs(more):.3f}" == "0.000":
        return f"the same {losses}"
    return f"{-more:.3f} lower {losses}" if more < 0 else f"{more:.3f} higher {losses}"


def _loss(outcome: Outcome) -> float:
    return outcome.loss_final if math.isfinite(outcome.loss_final) else math.inf


def _less(first: Outcome, best: Outcome) -> str:
    where = " between groups" if has_levels([first, best]) else ""
    by_first, by_best = slow_bytes(first), slow_bytes(best)
    if not by_best or best.plan == alone():
        return f"sends nothing{where}"
    if by_first >= by_best:
        return f"sends {times(by_first, by_best)} less{where}"
    return f"sends {times(by_best, by_first or 1)} more{where}"
