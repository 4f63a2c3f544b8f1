"""What the library does not get right yet: left out of what is drawn, until its name is removed from the table."""

from __future__ import annotations

from dataclasses import replace

from tests.property.plans import PLANS, Known
from tests.property.programs import Setup, StepOptions

OPEN: dict[str, str] = {
    "initial_broadcast": "the broadcast of the first weights of a bare module is not in the ledger",
    "rebind": "parameters that were given new memory after `attach`",
    "unfreeze": "parameters that are trained only later",
    "add": "parameters that are added to an optimizer later",
    "load": "weights that are loaded after `attach`, under a plan with an anchor",
    "reversed": "two optimizers that step in another order than they were given in",
    "nan_average_weights": "NaN weights on one worker when `average_weights()` or `change()` is called",
    "nan_buffers": "NaN buffers on one worker",
    "nan_buffers_kept": "NaN weights on one worker, where buffers are the first worker's or stay as they are",
    "nan_moments": "NaN weights on one worker when moments are averaged",
    "nan_streaming": "NaN weights on one worker, in fragments or with a delay",
    "nan_parameter_feedback": "NaN in one of several buckets, with error feedback: DDP's, or one for each dtype",
    "unused_feedback": "a parameter that no worker uses in a step, with error feedback",
    "amp_feedback": "a loss scale that changes, with error feedback under DDP",
    "amp_clip_nan": "clipping, a GradScaler and Inf on one worker, on a bare module",
    "amp_split": "a GradScaler and two optimizers on a bare module",
    "amp_scales": "workers whose loss scales differ after local steps average gradients under DDP",
    "change_moments": "after local steps, moments differ, and a plan that averages gradients lets workers part",
    "change_unused": "under DDP, a change from local steps to averaged gradients, with parameters that are not used",
    "freeze_local": "parameters that are frozen between two rounds, while workers hold different weights",
    "complex": "complex parameters",
    "refused_late": "more fragments than parameters are refused only in training",
    "qsr_resume": "a resumed `qsr`",
    "batch_norm_ddp": "DDP broadcasts buffers itself",
}


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
