"""How outcomes are judged: against which ones, by which loss, and by which bytes; and the table and headline of it.

Two runs are the measure of all others: `alone()`, whose workers never synchronise, and `ddp()`.

    kept       = (alone - plan) / (alone - ddp), of the loss at equal steps: the fraction of DDP's improvement over no
                 communication that a plan keeps
    efficiency = (seconds of ddp() without a slow link to the target) / (seconds of the plan over the link to it)

The ceiling of both is about 1. The floor of `kept` is 0; that of `efficiency` is the efficiency of `alone()`.

`alone - ddp` has noise. The curves of the two runs show it: how far their distance at a step is from the mean of the
distances before and after it. Where the distance is not `NOISES` times as large, nothing is said of what plans keep.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from laconic.plans.methods import alone, ddp
from laconic.plans.plan import Plan
from laconic.tools.compare.runs import SMOOTHED, Outcome, Point, as_row
from laconic.tools.machine import versions
from laconic.tools.units import duration, human_bytes, listed, percent, ratio, times

AS_GOOD = 0.01
"""A plan is as good as the reference if it has lowered the loss by at least 99% of what the reference has."""
NOISES = 3.0
"""How many times its noise the distance of `ddp()` and `alone()` must be, for `kept` to mean something."""


@dataclass(frozen=True)
class Gap:
    """How much lower the loss of `ddp()` is than that of `alone()`, and the noise of that distance.

    >>> Gap(0.004, 0.01).clear, Gap(0.2, 0.01).clear, Gap(0.2, None).clear
    (False, True, True)
    """

    loss: float
    noise: float | None
    """The standard deviation; None if the runs have fewer than three losses at equal steps."""

    @property
    def clear(self) -> bool:
        """Whether it is larger than the noise."""
        return self.loss > NOISES * (self.noise or 0.0)


def reference(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome that the others are compared with: that of `ddp()`, wherever it is in the list; else the first."""
    return _find(ddp(), outcomes) or next((each for each in outcomes if not each.without_link), outcomes[0])


def _find(plan: Plan, outcomes: Sequence[Outcome]) -> Outcome | None:
    return next((each for each in outcomes if each.plan == plan and not each.without_link), None)


def ceiling(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The outcome of `ddp()` without a slow link, if there is one."""
    free = next((each for each in outcomes if each.plan == ddp() and each.without_link), None)
    return free or next((each for each in outcomes if each.plan == ddp() and each.link is None), None)


def kept_fraction(alone: float, plan: float, ddp: float) -> float | None:
    """The fraction of DDP's improvement over no communication that a plan keeps.

    NaN for a plan whose loss is NaN; None if DDP is no improvement.

    >>> kept_fraction(alone=2.0, plan=1.7, ddp=1.5)
    0.6
    """
    gain = alone - ddp
    return round((alone - plan) / gain, 9) if math.isfinite(gain) and gain > 0 else None


def kept(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """What an outcome keeps; None without `alone()` or `ddp()`, or equal steps, or where the gap is mere noise."""
    floor, top = _find(alone(), outcomes), _find(ddp(), outcomes)
    losses = [] if floor is None or top is None else losses_at_equal_steps([floor, outcome, top])
    return kept_beside(outcomes, *losses) if losses else None


def kept_beside(outcomes: Sequence[Outcome], alone: float, plan: float, ddp: float) -> float | None:
    """What a plan keeps, from losses after equal steps; None where the gap is not larger than its noise.

    `outcomes` have the curves of `alone()` and `ddp()`.
    """
    return kept_fraction(alone, plan, ddp) if Gap(alone - ddp, gap_noise(outcomes)).clear else None


def final_gap(outcomes: Sequence[Outcome]) -> Gap | None:
    """The gap at the last step that both baselines have; None without them."""
    floor, top = _find(alone(), outcomes), _find(ddp(), outcomes)
    losses = [] if floor is None or top is None else losses_at_equal_steps([floor, top])
    return Gap(losses[0] - losses[1], gap_noise(outcomes)) if losses else None


def gap_noise(outcomes: Sequence[Outcome]) -> float | None:
    """The standard deviation of the gap from one validation to the next; None without three at equal steps."""
    floor, top = _find(alone(), outcomes), _find(ddp(), outcomes)
    if floor is None or top is None:
        return None
    alone_at, ddp_at = ({p.step: p.loss for p in _independent(each)} for each in (floor, top))
    gaps = [alone_at[step] - ddp_at[step] for step in sorted(alone_at.keys() & ddp_at.keys())]
    bends = [b - (a + c) / 2 for a, b, c in zip(gaps, gaps[1:], gaps[2:], strict=False)]
    bends = [bend for bend in bends if math.isfinite(bend)]
    return math.sqrt(fmean(bend * bend for bend in bends) / 1.5) if bends else None  # of a bend: 1 + 1/4 + 1/4


def _independent(outcome: Outcome) -> Sequence[Point]:
    """The losses that do not share steps: validations, or means of training losses that do not overlap."""
    return outcome.validations or outcome.curve[SMOOTHED - 1 :: SMOOTHED]


def seconds_to(outcome: Outcome, loss: float) -> float | None:
    """The seconds after which a run was first seen with a loss as low as this one; None if it never was."""
    curve = outcome.validations or outcome.curve
    return next((point.seconds for point in curve if point.loss <= loss and point.seconds > 0), None)


def efficiency(outcome: Outcome, outcomes: Sequence[Outcome]) -> float | None:
    """The speed to the target beside `ddp()` without a slow link: 0 if never reached, None if that is unknown."""
    free = ceiling(outcomes)
    if free is None or not free.reached:
        return None
    return free.seconds / outcome.seconds if outcome.reached else 0.0


def no_better_than_alone(outcome: Outcome, outcomes: Sequence[Outcome]) -> bool:
    """Whether workers would have done as well without synchronising: sooner at the target, or with as low a loss."""
    floor = _find(alone(), outcomes)
    if floor is None or outcome is floor or outcome.without_link:
        return False
    if floor.reached or outcome.reached:
        return not outcome.reached or (floor.reached and outcome.seconds >= floor.seconds)
    if "seconds" in (floor.ended, outcome.ended):
        return not _lower(outcome.loss_final, floor.loss_final)
    losses = losses_at_equal_steps([outcome, floor])
    return bool(losses) and not _lower(*losses)


def losses_at_equal_steps(outcomes: Sequence[Outcome]) -> list[float]:
    """The losses of outcomes after the same number of steps: the last that all of them have. Empty if there is none."""
    if len({each.steps for each in outcomes}) == 1:
        return [each.loss_final for each in outcomes]
    curves = [{p.step: p.loss for p in each.validations or each.curve} for each in outcomes]
    common = set.intersection(*(set(curve) for curve in curves))
    return [curve[max(common)] for curve in curves] if common else []


def as_good(outcome: Outcome, other: Outcome) -> bool:
    """Whether the final loss of an outcome is as low as that of the reference, within `AS_GOOD`. NaN is not."""
    if not math.isfinite(other.loss_final):
        return math.isfinite(outcome.loss_final)
    tolerance = AS_GOOD * max(0.0, other.loss_start - other.loss_final)
    return outcome.loss_final <= other.loss_final + tolerance


def slow_bytes(outcome: Outcome) -> int:
    """The bytes that a worker sends at the outermost level, which crosses the slowest links."""
    return outcome.level_bytes.get("world", 0) if outcome.level_bytes else outcome.wire_bytes


def has_levels(outcomes: Sequence[Outcome]) -> bool:
    """Whether a plan also sends inside groups of workers."""
    return any(level != "world" for outcome in outcomes for level in outcome.level_bytes)


def judgements(outcome: Outcome, outcomes: Sequence[Outcome]) -> dict[str, float | bool | None]:
    """How an outcome is judged beside the others."""
    return {
        "kept": kept(outcome, outcomes),
        "efficiency": efficiency(outcome, outcomes),
        "no_better_than_alone": no_better_than_alone(outcome, outcomes),
    }


def as_json(outcomes: Sequence[Outcome]) -> str:
    """A JSON list with one object for each outcome, and how it is judged. NaN and infinity become null."""
    rows = [as_row(each) | judgements(each, outcomes) | {"versions": versions()} for each in outcomes]
    text = json.loads(json.dumps(rows), parse_constant=lambda name: None)
    return json.dumps(text, indent=1, allow_nan=False) + "\n"


def cells(outcome: Outcome, outcomes: Sequence[Outcome]) -> dict[str, str]:
    """The cells of an outcome in the closing table and in the report, by heading.

    Ratios are to `ddp()`, or else the first plan. "fewer" counts the bytes of the outermost level alone. If plans also
    send inside groups, a column shows them.
    """
    first, target = reference(outcomes), reference(outcomes).until_loss
    seconds = ("seconds" if target is None else f"seconds\nto {target:g}") + (
        "" if first.clock == "measured" else "\n(computed)"
    )
    compared = first.ended == outcome.ended != "seconds" and (target is None or outcome.reached)
    found = {
        f"{first.loss_of} loss": f"{outcome.loss_start:.3f} -> {outcome.loss_final:.3f}",
        "kept": percent(kept(outcome, outcomes)),
        "sent\nby each": human_bytes(outcome.wire_bytes),
        "between\ngroups": human_bytes(slow_bytes(outcome)),
        "fewer": "-" if outcome.plan == alone() else ratio(slow_bytes(first), slow_bytes(outcome)),
        seconds: f"{outcome.seconds:.1f}" if outcome.reached or target is None else f"not in {outcome.seconds:.1f}",
        "sooner": ratio(first.seconds, outcome.seconds) if compared else "-",
    }
    if not has_levels(outcomes):
        del found["between\ngroups"]
    if target is not None:
        speed = efficiency(outcome, outcomes)
        found["efficiency"] = "-" if speed is None else f"{speed:.2f}"
    return found


# The result in one or two sentences.


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
    floor, speed = _find(alone(), compared), efficiency(best, outcomes)
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


def _lower(loss: float, than: float) -> bool:
    """Whether a loss is lower than another one; NaN is the highest."""
    return math.isfinite(loss) and not (math.isfinite(than) and loss >= than)
