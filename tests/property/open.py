"""What the library does not get right yet: left out of what is drawn, until its name is removed from the table."""

from __future__ import annotations

from dataclasses import replace

from tests.property.plans import PLANS, Known
from tests.property.programs import Setup, StepOptions

OPEN: dict[str, str] = {}


def open_setup(setup: Setup) -> Setup:
    """Return the setup without what is open, and without what no honest user combines."""
    if not setup.known.fits(setup.workers):
        setup = replace(setup, workers=4 if setup.known.fits(4) else 2)
    features = set(setup.features)
    if setup.wrap == "ddp" and "batch_norm_ddp" in OPEN:
        features.discard("batch_norm")
    if "complex" in OPEN or setup.amp:  # torch's GradScaler takes neither complex nor fp16 gradients
        features.discard("complex")
    if setup.amp:
        features.discard("fp16")
    if "amp_feedback" in OPEN and setup.wrap == "ddp" and setup.known.lossy:
        setup = replace(setup, amp=False)
    if "amp_split" in OPEN and setup.wrap == "bare" and setup.amp:
        setup = replace(setup, split=False)
    turned = setup.reversed and setup.split and "reversed" not in OPEN
    return replace(setup, features=frozenset(features), reversed=turned)


def open_options(options: StepOptions, setup: Setup, plan: str, gradients: bool, sound: bool) -> StepOptions:
    """Return the options of a step without what is open. `gradients`: whether they are averaged in this step."""
    known = PLANS[plan]
    nan = options.nan
    several = setup.wrap == "ddp" or bool(setup.features & {"bf16", "fp16", "complex"})
    if nan is not None:
        nan = replace(nan, worker=nan.worker % setup.workers)
        if setup.amp and setup.split:
            nan = replace(nan, parameter=None)  # a GradScaler decides for each optimizer
        local = not gradients and not setup.amp
        clipped = options.clip is not None and setup.amp and setup.wrap == "bare"
        if nan.parameter and known.lossy and several and "nan_parameter_feedback" in OPEN:
            nan = replace(nan, parameter=None)
        if local and (setup.workers == 1 or not sound):
            nan = None  # somebody must hold weights that can be averaged
        elif (local and _nan_weights_open(known)) or (clipped and "amp_clip_nan" in OPEN):
            nan = None
    branch = options.branch
    if known.lossy and not any(branch[: setup.workers]) and "unused_feedback" in OPEN:
        branch = (True, *branch[1:])
    return replace(options, nan=nan, branch=branch)


def _nan_weights_open(known: Known) -> bool:
    """Return whether it is open what NaN weights on one worker lead to under this plan."""
    return (
        ("nan_streaming" in OPEN and (known.fragments > 1 or known.delay > 0))
        or ("nan_moments" in OPEN and known.plan.optimizer_state == "average")
        or ("nan_buffers_kept" in OPEN and known.plan.buffers != "average")
    )
