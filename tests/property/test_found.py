"""Trainings that were once wrong, each as short as it can be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.property.machine import Training
from tests.property.programs import Nan, Setup, StepOptions

Program = Callable[[Training], object]

BATCH_NORM, BF16, BRANCH, FROZEN = (frozenset({name}) for name in ("batch_norm", "bf16", "branch", "frozen"))
NAN, NAN_IN_SCALE = StepOptions(nan=Nan(1)), StepOptions(nan=Nan(1, "scale"))
ONE_USES = StepOptions(branch=(False, True, False, False))
ONE_USES_NAN = StepOptions(branch=(False, True, False, False), nan=Nan(1))
UNUSED = StepOptions(branch=(False,) * 4)
HALF_USED = StepOptions(branch=(True, False, True, False))


def _steps(count: int) -> Program:
    return lambda training: training.plain_steps(count=count)


def _step(options: StepOptions) -> Program:
    return lambda training: training.step(options=options)


def _change(plan: str) -> Program:
    return lambda training: training.change(plan=plan)


def _poison(worker: int) -> Program:
    return lambda training: training.poison(worker=worker, name="scale")


def _train(name: str, trained: bool) -> Program:
    return lambda training: training.train(name=name, trained=trained)


def _poison_buffer(training: Training) -> None:
    training.poison_buffer(worker=1)


FOUND: list[tuple[str, Setup, list[Program]]] = [
    ("initial_broadcast", Setup(), [_steps(1)]),
    ("rebind", Setup("post_local"), [Training.rebind, _steps(2)]),
    ("rebind", Setup("ddp"), [Training.rebind, _steps(2)]),
    ("unfreeze", Setup("ddp", features=FROZEN), [_train("first", True), _steps(2)]),
    ("unfreeze_local", Setup("diloco", features=FROZEN), [_train("first", True), _steps(2)]),
    ("add", Setup("ddp"), [Training.add, _steps(2)]),
    ("add", Setup("post_local"), [Training.add, _steps(2)]),
    ("load", Setup("diloco"), [lambda t: t.load(factor=0.5), _steps(2)]),
    ("reversed", Setup("ddp", split=True, reversed=True), [_steps(2)]),
    ("reversed", Setup("post_local", split=True, reversed=True), [_steps(2)]),
    ("nan_average_weights", Setup("every"), [_steps(1), _poison(1), Training.average_weights]),
    ("nan_average_weights", Setup("every"), [_steps(1), _poison(1), _change("diloco")]),
    ("nan_buffers", Setup("post_local", features=BATCH_NORM), [_steps(1), _poison_buffer, _steps(1)]),
    ("nan_buffers_kept", Setup("post_local_leader", features=BATCH_NORM), [_steps(1), _poison(0), _steps(1)]),
    ("nan_buffers_kept", Setup("post_local_keep", features=BATCH_NORM), [_steps(1), _poison(1), _steps(1)]),
    ("nan_moments", Setup("post_local_average"), [_step(NAN), _steps(3)]),
    ("nan_streaming", Setup("streaming_delay"), [_step(NAN), _steps(6), Training.recovered]),
    ("nan_streaming", Setup("streaming_fragments"), [_step(NAN), _steps(8), Training.recovered]),
    ("nan_parameter_feedback", Setup("power_sgd_two", wrap="ddp"), [_steps(2), _step(NAN_IN_SCALE), _steps(1)]),
    ("nan_parameter_feedback", Setup("power_sgd_two", features=BF16), [_steps(2), _step(NAN_IN_SCALE), _steps(1)]),
    ("unused_feedback", Setup("feedback_quantized", features=BRANCH), [_steps(2), _step(UNUSED), _steps(1)]),
    ("unused_feedback", Setup("power_sgd_two", wrap="ddp", features=BRANCH), [_steps(2), _step(UNUSED), _steps(1)]),
    ("unused_feedback", Setup("power_sgd_two"), [_steps(2), _train("mid", False), _steps(1)]),
    ("amp_feedback", Setup("power_sgd_two", wrap="ddp", amp=True), [_steps(4)]),
    ("amp_clip_nan", Setup("ddp", amp=True), [_steps(1), _step(StepOptions(clip=0.5, nan=Nan(1)))]),
    ("amp_split", Setup("power_sgd_two", amp=True, split=True), [_steps(4)]),
    ("amp_scales", Setup("post_local", wrap="ddp", amp=True), [_step(NAN), _change("diloco_groups"), _steps(1)]),
    ("change_moments", Setup("post_local"), [_steps(2), _change("ddp"), _steps(1)]),
    (
        "change_unused",
        Setup("post_local", wrap="ddp", features=BRANCH),
        [_steps(2), _change("diloco_groups"), _step(HALF_USED), _change("diloco"), _steps(2)],
    ),
    ("add_in_groups", Setup("ddp", workers=4), [Training.add, _change("diloco_groups"), _steps(2)]),
    ("change_residuals", Setup("power_sgd_two"), [Training.add, _steps(1), _change("power_sgd_two"), _steps(1)]),
    ("change_residuals", Setup("power_sgd_two"), [_steps(2), _change("ddp"), _steps(34)]),
    ("change_residuals_deltas", Setup("deltas_low_rank"), [_steps(2), _change("ddp"), _steps(1)]),
    ("freeze_local", Setup("diloco"), [_steps(2), _train("down", False), _steps(5)]),
    ("freeze_nan", Setup("diloco"), [_steps(3), _train("down", False), _poison(1), _steps(3)]),
    ("freeze_resume", Setup("every"), [_steps(1), _train("down", False), Training.resume, _steps(4)]),
    (
        "unfreeze_resume",
        Setup("diloco", features=FROZEN),
        [_train("first", True), _steps(1), Training.resume, _steps(3)],
    ),
    ("add_resume", Setup("diloco"), [_steps(2), Training.add, _steps(1), Training.resume, _steps(3)]),
    ("add_nan", Setup("streaming_fragments"), [_steps(3), Training.add, _poison(1), _steps(8)]),
    ("rebind_in_flight", Setup("streaming_delay"), [_steps(3), Training.rebind, _steps(4)]),
    ("nan_fragments", Setup("streaming_adopt"), [_steps(1), _poison(1), _steps(8), Training.recovered]),
    (
        "nan_moments_of_one",
        Setup("post_local_average", features=BRANCH, optimizer="adamw"),
        [_step(ONE_USES), _step(ONE_USES_NAN), _steps(4)],
    ),
    (
        "change_unused",
        Setup("post_local", wrap="ddp", features=BRANCH),
        [_steps(1), _change("post_local_start"), _steps(2)],
    ),
    ("change_residuals_rebound", Setup("streaming_diloco(2, 2, 0)"), [_steps(4), Training.rebind, _change("ddp")]),
    ("freeze_fragment", Setup("streaming_diloco(2, 2, 0)"), [_train("first", False), _steps(4)]),
    ("fp16", Setup("power_sgd_two", features=frozenset({"fp16"})), [_steps(8)]),
    ("complex", Setup("ddp", features=frozenset({"complex"})), [_steps(1)]),
    ("complex", Setup("diloco", features=frozenset({"complex"})), [_steps(2)]),
    ("complex", Setup("feedback_bf16", features=frozenset({"complex"})), [_steps(2)]),
    ("complex", Setup("power_sgd_two", features=frozenset({"complex"})), [_steps(2)]),
    ("qsr_resume", Setup("qsr", scheduled=True), [_steps(2), Training.resume, _steps(6)]),
    ("batch_norm_ddp", Setup("ddp", wrap="ddp", features=BATCH_NORM), [_steps(2)]),
    ("mix_now", Setup("streaming_mix_now"), [_steps(9)]),
    ("exclude", Setup("ddp", workers=3, nonfinite="exclude"), [_steps(1), _step(NAN), _steps(1)]),
    (
        "exclude_carried",
        Setup("power_sgd_two", workers=3, wrap="ddp", nonfinite="exclude"),
        [_steps(2), _step(NAN), _change("feedback_quantized"), _step(NAN), _change("ddp"), _step(NAN), _steps(2)],
    ),
    ("exclude_groups", Setup("diloco_groups", workers=4, nonfinite="exclude"), [_steps(1), _step(NAN), _steps(2)]),
    (
        "levels",
        Setup("streamed_groups", workers=4, levels=True, features=BF16),
        [_steps(4), _step(NAN), _steps(3), _change("post_local_groups"), _steps(4), _change("hierarchical"), _steps(4)],
    ),
    ("levels_leader", Setup("hierarchical", workers=4, levels=True, features=BATCH_NORM), [_steps(5)]),
    (
        "levels_carried",
        Setup("feedback_quantized", workers=4, levels=True),
        [_steps(3), _change("streamed_groups"), _steps(5), _change("power_sgd_two"), _steps(4)],
    ),
    (
        "go_back",
        Setup("streaming_diloco(8, 4, 1)", workers=3),
        [_steps(4), Training.save, _steps(4), Training.go_back, _steps(6), Training.go_back, _steps(2)],
    ),
    (
        "go_back",
        Setup("streaming_groups", workers=4, levels=True),
        [_steps(4), Training.save, _steps(3), Training.go_back, _steps(6), _change("streaming_mix_now"), _steps(5)],
    ),
    ("go_back", Setup("power_sgd_two", wrap="ddp"), [_steps(3), Training.save, _steps(2), Training.go_back, _steps(2)]),
    ("refused", Setup(), [lambda t: t.refused(kind="plan")]),
    ("refused", Setup(), [lambda t: t.refused(kind="groups")]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("name", "setup", "program"), FOUND, ids=[f"{name}-{setup.plan}" for name, setup, _ in FOUND])
def test_it_is_right_now(name, setup, program):
    training = Training()
    try:
        training.attach(setup=setup)
        for operation in program:
            operation(training)
    finally:
        training.teardown()
