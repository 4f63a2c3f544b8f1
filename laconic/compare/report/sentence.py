"""The result of a comparison in one sentence."""

from collections.abc import Sequence

from laconic.compare.records import Outcome
from laconic.compare.units import duration, times


def headline(outcomes: Sequence[Outcome]) -> str:
    """Compare the best plan with the first one."""
    first = outcomes[0]
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
    return f"{reaches}, {times(first.seconds, best.seconds)} sooner than {first.plan}, and {_less(first, best)}."


def _in_given_time(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    best = min(outcomes, key=lambda outcome: outcome.loss_final)
    reaches = f"In {duration(best.seconds)}, {best.plan} reaches a {best.loss_of} loss of {best.loss_final:.3f}"
    if best is first:
        return f"{reaches}; no other plan reaches a lower loss." if len(outcomes) > 1 else f"{reaches}."
    return f"{reaches}, {first.plan} reaches {first.loss_final:.3f}; {best.plan} {_less(first, best)}."


def _same_steps(first: Outcome, outcomes: Sequence[Outcome]) -> str:
    best = min(outcomes, key=lambda outcome: outcome.seconds)
    takes = f"{best.plan} takes {duration(best.seconds)} for {best.steps} steps"
    loss = f"a {best.loss_of} loss of {best.loss_final:.3f}"
    if best is first:
        return f"{takes} and ends at {loss}" + ("; no other plan is faster." if len(outcomes) > 1 else ".")
    return (
        f"{takes}, {times(first.seconds, best.seconds)} sooner than {first.plan}, {_less(first, best)}, and ends at "
        f"{loss} against {first.loss_final:.3f}."
    )


def _less(first: Outcome, best: Outcome) -> str:
    if not best.sent_bytes:
        return "sends nothing"
    if first.sent_bytes >= best.sent_bytes:
        return f"sends {times(first.sent_bytes, best.sent_bytes)} less"
    return f"sends {times(best.sent_bytes, first.sent_bytes)} more"
