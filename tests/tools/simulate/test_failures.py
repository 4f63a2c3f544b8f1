"""A worker that is lost: the others go back to the last commit and go on without it, as real processes do."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from torch.optim import AdamW

import laconic
from laconic.tools.errors import UsageError
from laconic.tools.lab.script import lr_share
from laconic.tools.lab.tasks import Lab, loss_of, make_task
from laconic.tools.machine import usable_cores
from laconic.tools.simulate.clock import Conditions, SimulatedStep
from laconic.tools.simulate.training import SimulatedRun, Training, failures_of, lab_task
from tests.workers import run_workers

WORKERS, STEPS = 4, 8


def _settings(plan: str) -> Lab:
    return Lab(layers=1, width=32, context=16, batch=2, seed=1)


def _simulate(plan: str, *fail: str) -> tuple[Training, list[SimulatedStep]]:
    settings = _settings(plan)
    failures = failures_of(list(fail), WORKERS, STEPS)
    run = SimulatedRun(laconic.plan(plan), WORKERS, STEPS, settings.lr, conditions=Conditions(1.0), failures=failures)
    training = Training(run, lab_task(settings))
    return training, list(training.steps())


def _train_on_without(worker: int, plan: str, lost: int, commit: int) -> list[float]:
    """Train real workers, of which one leaves after the step `commit`; the others go on in a new group."""
    settings = _settings(plan)
    torch.set_num_threads(max(1, usable_cores() // WORKERS))
    task = make_task(settings)
    optimizer = AdamW(task.model.parameters(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.01)
    session = laconic.attach(laconic.plan(plan), task.model, optimizer)
    losses: list[float] = []
    left = [each for each in range(WORKERS) if each != lost]
    for step in range(1, STEPS + 1):
        if step == commit + 1:
            if worker == lost:
                return losses
            group = dist.new_group(left, use_local_synchronization=True)
            assert isinstance(group, dist.ProcessGroup)
            state = deepcopy(session.state_dict())
            session.regroup(group)
            session.load_state_dict(state)  # with what was in flight
        optimizer.param_groups[0]["lr"] = settings.lr * lr_share(step, STEPS)
        loss = loss_of(task.model, task.draw(worker, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "step", "commit"),
    [("ddp()", 5, 4), ("quantized_ddp()", 5, 4), ("diloco(period=3)", 5, 3), ("frugal('30x', delay=1)", 6, 4)],
)
def test_survivors_train_as_real_processes_do(plan, step, commit):
    real = run_workers(_train_on_without, WORKERS, (plan, 2, commit), timeout_s=120)
    _, steps = _simulate(plan, f"2@{step}")
    final = {each.step: each.losses for each in steps}  # a step that was undone comes again: the last counts
    for number in range(1, STEPS + 1):
        these = [losses[number - 1] for losses in real if len(losses) >= number]
        assert list(final[number]) == these, number


def test_what_a_failure_costs():
    training, steps = _simulate("diloco(period=3)", "2@5")
    # Worker 2 is lost at step 5. The others notice in the round of step 6, and go back to step 3.
    assert [each.step for each in steps] == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8]
    assert [len(each.losses) for each in steps] == [4, 4, 4, 4, 3, 3, 3, 3, 3, 3]
    assert steps[-1].seconds == STEPS + 3
    assert training.alive == (0, 1, 3)
    assert training.clock.use().faults == pytest.approx(3 * 3 / (3 * 11 + 4), abs=0.03)


def test_several_workers_are_lost_in_one_round_and_later():
    training, steps = _simulate("diloco(period=4)", "2@3", "0@4", "1@7")
    assert training.alive == (3,)
    assert [len(each.losses) for each in steps if each.step == STEPS] == [1]


def test_a_worker_alone_goes_on_where_nobody_synchronises():
    training, steps = _simulate("alone()", "0@3")
    assert [len(each.losses) for each in steps] == [4, 4, *[3] * 6]
    assert training.validation_loss() is not None


@pytest.mark.parametrize("text", ["4@3", "1@0", "1@9", "1", "x@2"])
def test_failures_that_cannot_be(text):
    with pytest.raises(UsageError, match=r"--fail .* worker from 0 to 3 and a step from 1 to 8"):
        failures_of([text], WORKERS, STEPS)


def test_somebody_must_stay():
    with pytest.raises(UsageError, match="one of the 2 must stay"):
        failures_of(["0@1", "1@2"], 2, STEPS)
