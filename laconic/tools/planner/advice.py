"""One sentence: which plan to use, or none, and why."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.tools.planner.predict import Prediction
from laconic.tools.units import rate_text, share

WORTH = 1.05
"""How many times sooner than `ddp()` a plan must reach the same loss to be worth a change."""


def advice(predictions: Sequence[Prediction], ddp: Prediction, alone: Prediction) -> str:
    """Say which plan reaches the same loss first, beside `ddp()` and beside workers that never talk."""
    known = [each for each in predictions if each.loss_s is not None and each.plan not in (ddp.plan, alone.plan)]
    best = max(known, key=lambda each: each.sooner_than(ddp) or 0.0, default=None)
    over_alone = ddp.sooner_than(alone) or 0.0
    busy = f"under ddp() workers compute {share(ddp.now.utilisation)} of the time"
    if best is None:
        return f"{busy[0].upper()}{busy[1:]}. {_unknown(predictions, ddp)}"
    sooner, than_alone = best.sooner_than(ddp) or 0.0, best.sooner_than(alone) or 0.0
    if sooner < WORTH and over_alone >= 1:
        return f"Do not compress: {busy}, and {_no_sooner(best, sooner)}."
    if than_alone < 1:
        return (
            f"Do not train together over this link: {best.plan}, the best of these plans, reaches the same loss "
            f"{1 / than_alone:.1f} times later than workers that never talk. Get a faster link, longer steps (larger "
            "batches), or a plan that sends less."
        )
    factor = best.steps_factor or 1.0
    more = "" if factor < 1.005 else f" It needs {factor:.2f} times as many steps, for it keeps {share(best.kept)}."
    return (
        f"Use {best.plan}: it reaches the same loss {sooner:.1f} times sooner than ddp() and {than_alone:.1f} times "
        f"sooner than alone(); {busy}, under it {share(best.now.utilisation)}.{more}{_until(best, ddp)}"
    )


def _unknown(predictions: Sequence[Prediction], ddp: Prediction) -> str:
    others = [each for each in predictions if each.loss_s is None]
    if not others:
        return "No other plan was given."
    quick = min(others, key=lambda each: each.step_s)
    return (
        f"A step of {quick.plan} is {ddp.step_s / quick.step_s:.1f} times as fast as one of ddp(), but what it does to "
        "the loss was not measured: compare it beside alone() first (laconic compare)."
    )


def _no_sooner(best: Prediction, sooner: float) -> str:
    if sooner >= 1:
        return f"{best.plan}, the best of the others, reaches the same loss only {sooner:.2f} times sooner"
    return f"{best.plan}, the best of the others, reaches the same loss {1 / sooner:.2f} times later"


def _until(best: Prediction, ddp: Prediction) -> str:
    rate = best.break_even_bps(ddp)
    return "" if rate is None else f" On links faster than {rate_text(float(f'{rate:.2g}'))}, do not compress."
