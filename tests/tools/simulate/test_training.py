"""A simulated training gives the losses and the bytes of real processes, bit for bit."""

from __future__ import annotations

import math
import os

import pytest
import torch
from torch import Tensor

import laconic
from laconic.session.observers import StepObserver, Validation
from laconic.session.session import Session
from laconic.tools.compare.reporter import control_group, mean_over, mean_weights, number
from laconic.tools.lab import script
from laconic.tools.lab.tasks import Lab, make_task
from laconic.tools.machine import usable_cores
from laconic.tools.simulate.clock import SimulatedStep
from laconic.tools.simulate.training import SimulatedRun, Training, lab_task
from tests.workers import run_workers

PLANS = (
    "ddp()",
    "power_sgd(rank=2)",
    "quantized_ddp()",
    "diloco(period=2)",
    "streaming_diloco(period=4, fragments=2, delay=1)",
    "frugal('60x')",
)
MORE_PLANS = (
    "alone()",
    "power_sgd(rank=4, bits=None, rounds='alternating', start=3)",
    "post_local_sgd(start=3, period=2)",
    "diloco(period=2, momentum=0.9, codec=Quantized(bits=4), optimizer_state='average')",
    "hierarchical_sgd({2: 1, 4: 4})",
    "post_local_sgd(period=2, group=2)",
    "sparse_loco(period=2)",
    "qsr(growth=0.01, floor=2)",
)


LAB, STEPS = Lab(layers=2, width=32, context=16, batch=2, lr=5e-3, bucket_mb=0.05, seed=3), 8


class _Recorder(StepObserver):
    """Keeps the losses that one worker reports after each step, and the validation loss after the last."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.sent: list[int] = []
        self.final = math.nan

    def report(self, session: Session, loss: float | Tensor, tokens: int, validation: Validation | None) -> bool:
        if not session.step:
            self._control = control_group(session.group)
        elif session.step > len(self.losses):
            self.losses.append(number(loss))
            self.sent.append(session.ledger.wire_bytes)
        else:
            assert callable(validation)
            with mean_weights(session, self._control):
                self.final = mean_over(self._control, number(validation()))[0]
        return False


_recorder = _Recorder()


def recorder() -> StepObserver:
    """Return the recorder of this process."""
    return _recorder


def _train(worker: int, plan: str, workers: int) -> tuple[list[float], list[int], float]:
    """Train as the lab's script does in a real process."""
    os.environ |= {"LACONIC_PLAN": plan, "LACONIC_OBSERVERS": f"{__name__}:recorder"}
    torch.set_num_threads(max(1, usable_cores() // workers))
    script.train(LAB, STEPS, make_task(LAB))
    return _recorder.losses, _recorder.sent, _recorder.final


def _simulate(plan: str, workers: int) -> tuple[list[SimulatedStep], float | None]:
    training = Training(SimulatedRun(laconic.plan(plan), workers, STEPS, LAB.lr, LAB.bucket_mb), lab_task(LAB))
    return list(training.steps()), training.validation_loss()


def _check_equal(plan: str, workers: int) -> None:
    real = run_workers(_train, workers, (plan, workers), timeout_s=120)
    steps, final = _simulate(plan, workers)
    assert [step.losses for step in steps] == list(zip(*(losses for losses, _, _ in real), strict=True))
    assert final == real[0][2]
    if "streaming" not in plan:  # a real fragment may be in flight when its step is reported
        assert [step.sent_bytes for step in steps] == real[0][1]


@pytest.mark.parametrize("plan", [PLANS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in PLANS[1:])])
def test_four_workers_have_the_losses_of_real_processes(plan):
    _check_equal(plan, workers=4)


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("plan", MORE_PLANS)
def test_other_plans_and_numbers_of_workers(plan, workers):
    if workers == 3 and ("group" in plan or "hierarchical" in plan):
        pytest.skip("groups of two do not divide three workers")
    _check_equal(plan, workers)
