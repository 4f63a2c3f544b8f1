"""Rounds by time: workers take different numbers of steps, and meet after their first step past the deadline.

A clock that the training itself moves takes the place of the real one: each step costs some seconds on it.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint
from laconic.errors import DesyncError, NonFiniteError, PlanError
from laconic.integrations.worker_files import check_can_save
from laconic.session import step_headers
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import WorkerError, run_workers

COSTS = (1.0, 2.0, 4.0)
"""Seconds of a step on each worker."""
TAKEN = (10, 5, 3)
"""Steps of each worker in a round of 10 seconds."""


@pytest.fixture(autouse=True)
def _real_clock_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(step_headers), "monotonic", vars(step_headers)["monotonic"])


class Training:
    """One worker and its clock."""

    def __init__(self, worker: int, plan: str, kind: str = "bare", **options: Any) -> None:
        self.now_s = 0.0
        vars(step_headers)["monotonic"] = lambda: self.now_s
        self.worker, self.cost_s, self.weighted = worker, COSTS[worker], options.get("weighted", False)
        self.module = mlp(depth=1)
        self.model: nn.Module = DDP(self.module) if kind == "ddp" else self.module
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1, momentum=0.9)
        self.session = laconic.attach(plan, self.model, self.optimizer, **options)

    def step(self) -> None:
        self.now_s += self.cost_s
        if self.weighted:
            self.session.weigh(_samples(self.worker, self.session.step))
        _train(self.model, self.optimizer, self.worker, self.session.step)

    def until(self, progress: float) -> None:
        while self.session.progress < progress:
            self.step()

    @property
    def weights(self) -> Tensor:
        return weights(self.module)

    def save(self) -> dict[str, Any]:
        parts: dict[str, Any] = {"model": self.module, "optimizer": self.optimizer, "session": self.session}
        return {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}

    def load(self, saved: dict[str, Any]) -> None:
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.session.load_state_dict(saved["session"])


def _samples(worker: int, step: int) -> int:
    return 3 + 5 * worker + step % 2


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, step: int) -> None:
    x, y = batch(worker, step)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def _mean(vectors: list[Tensor], counts: list[int]) -> Tensor:
    return sum((n * v.double() for n, v in zip(counts, vectors, strict=True)), torch.zeros(())).float() / sum(counts)


def _by_hand(weighted: bool, many: int) -> list[Tensor]:
    """Return the weights after each round, trained in one process."""
    models = [mlp(depth=1) for _ in COSTS]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    found, steps = [], [0, 0, 0]
    for _ in range(many):
        counts = [0, 0, 0]
        for worker, taken in enumerate(TAKEN):
            for _ in range(taken):
                counts[worker] += _samples(worker, steps[worker]) if weighted else 1
                _train(models[worker], optimizers[worker], worker, steps[worker])
                steps[worker] += 1
        found.append(_mean([weights(model) for model in models], counts))
        for model in models:
            nn.utils.vector_to_parameters(found[-1].clone(), model.parameters())
    return found


# What a round is


def _rounds(worker: int, kind: str, plan: str, weighted: bool) -> list[Any]:
    training = Training(worker, plan, kind, weighted=weighted)
    found: list[Any] = []
    with training.session as session:
        while session.progress < 18:
            training.step()
            if session.synced:
                found.append((session.step, session.progress, training.weights))
    return found


@pytest.mark.parametrize(
    ("kind", "weighted"), [("bare", False), ("ddp", True), pytest.param("ddp", False, marks=pytest.mark.slow)]
)
def test_workers_take_as_many_steps_as_they_can_and_weigh_by_them(kind, weighted):
    results = run_workers(_rounds, 3, (kind, "post_local_sgd(every='10s')", weighted))
    by_hand = _by_hand(weighted, 3)
    for worker, found in enumerate(results):
        assert [step for step, *_ in found] == [TAKEN[worker] * n for n in (1, 2, 3)]
        assert [progress for _, progress, _ in found] == [6, 12, 18]  # the mean of 10, 5 and 3 steps a round
        for (*_, ours), theirs in zip(found, by_hand, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert_equal_bits([found[-1][2] for found in results])


def _after_gradients(worker: int) -> list[Any]:
    training = Training(worker, "diloco(start=4, every='10s')")
    found: list[Any] = []
    with training.session as session:
        while session.progress < 12:
            training.step()
            if session.synced:
                found.append((session.step, session.progress, training.weights))
    return found


def test_gradients_are_averaged_before_the_start():
    results = run_workers(_after_gradients, 3)
    for worker, found in enumerate(results):
        steps = [1, 2, 3, 3 + TAKEN[worker], 3 + 2 * TAKEN[worker]]
        assert [step for step, *_ in found] == steps
        assert [progress for _, progress, _ in found] == [1, 2, 3, 9, 15]
    for each in zip(*results, strict=True):
        assert_equal_bits([vector for *_, vector in each])


def _skipping(worker: int) -> tuple[float, int, Tensor]:
    """Worker 2 steps once, and then has no data."""
    training = Training(worker, "post_local_sgd(every='10s')")
    with training.session as session:
        while session.progress == 0:
            if worker == 2 and session.step:
                training.now_s += training.cost_s
                session.skip()
            else:
                training.step()
        return session.progress, session.step, training.weights


def test_steps_that_are_skipped_do_not_count():
    results = run_workers(_skipping, 3)
    assert [(progress, step) for progress, step, _ in results] == [((10 + 5 + 1) / 3, taken) for taken in TAKEN]
    ends = []
    for worker, taken in enumerate((10, 5, 1)):
        model = mlp(depth=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(taken):
            _train(model, optimizer, worker, step)
        ends.append(weights(model))
    torch.testing.assert_close(results[0][2], _mean(ends, [10, 5, 1]), rtol=1e-5, atol=1e-6)


def test_a_world_of_one_has_rounds_too():
    training = Training(0, "diloco(every='10s')")
    with training.session as session:
        synced = []
        for _ in range(21):
            training.step()
            synced.append(session.synced)
        assert [step for step, each in enumerate(synced, 1) if each] == [10, 20]
        assert session.progress == 20


# Faults


def _nan(worker: int, policy: str) -> tuple[str, Tensor, list[int]]:
    training = Training(worker, "post_local_sgd(every='10s')", nonfinite=policy)
    with training.session as session:
        training.until(6)
        try:
            while session.progress < 12:
                if worker == 1 and session.step == 7:
                    next(training.module.parameters()).data[0, 0] = torch.nan
                training.step()
        except NonFiniteError as error:
            return str(error), training.weights, error.workers
        return "", training.weights, []


def test_a_worker_with_nan_weighs_nothing():
    results = run_workers(_nan, 3, ("skip",))
    assert_equal_bits([vector for _, vector, _ in results])
    first = _by_hand(weighted=False, many=1)[0]
    ends = []
    for worker in (0, 2):
        model = mlp(depth=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(TAKEN[worker]):
            _train(model, optimizer, worker, step)
        nn.utils.vector_to_parameters(first.clone(), model.parameters())
        for step in range(TAKEN[worker], 2 * TAKEN[worker]):
            _train(model, optimizer, worker, step)
        ends.append(weights(model))
    torch.testing.assert_close(results[0][1], _mean(ends, [10, 3]), rtol=1e-5, atol=1e-6)


def test_nan_is_raised_with_the_round():
    for said, _, bad in run_workers(_nan, 3, ("raise",)):
        assert said.startswith("round 2, weights: worker 1 had NaN or Inf")
        assert bad == [1]


def _stopped(worker: int) -> tuple[int, float, bool]:
    training = Training(worker, "diloco(every='10s')")
    with training.session as session:
        session.stop_on(signal.SIGTERM)
        while not session.should_stop:
            if worker == 1 and session.step == 7:
                os.kill(os.getpid(), signal.SIGTERM)
            training.step()
        return session.step, session.progress, session.synced


def test_all_stop_after_the_same_round():
    assert run_workers(_stopped, 3) == [(2 * taken, 12, True) for taken in TAKEN]


def _another_round(worker: int) -> str:
    training = Training(worker, "diloco(every='10s')")
    with training.session as session:
        saved = training.save()
        training.until(6)
        if worker == 2:
            session.load_state_dict(saved["session"])
        try:
            training.until(12)
        except DesyncError as error:
            return str(error)
    return "no error"


def test_a_worker_in_another_round_is_named():
    for worker, said in enumerate(run_workers(_another_round, 3)):
        here = 1 if worker == 2 else 2
        assert re.search(rf"\(world, round {here} here\): worker 2 at round 1 and the others at round 2", said)


def _disagree(worker: int, ours: str, theirs: str) -> None:
    Training(worker, theirs if worker == 1 else ours)


@pytest.mark.parametrize(("ours", "theirs"), [("diloco()", "diloco(every='30s')")])
def test_a_worker_with_another_plan_is_named(ours, theirs):
    with pytest.raises(WorkerError, match=r"DisagreementError: (.|\n)*worker 1 has plan: diloco\(every='30s'\)"):
        run_workers(_disagree, 2, (ours, theirs))


# Saving and changing


def _resumed(worker: int, plan: str, weighted: bool) -> list[tuple[int, float, Tensor]]:
    whole = Training(worker, plan, weighted=weighted)
    with whole.session:
        whole.until(12)
        saved = whole.save()
        whole.until(24)
        end = whole.session.step, whole.session.progress, whole.weights
    again = Training(worker, plan, weighted=weighted)
    with again.session:
        again.load(saved)
        again.until(24)
        return [end, (again.session.step, again.session.progress, again.weights)]


@pytest.mark.parametrize("weighted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_resumed_run_goes_on_bit_for_bit(weighted):
    plan = "diloco(every='10s', lr=0.7, momentum=0.5)"
    for worker, (whole, again) in enumerate(run_workers(_resumed, 3, (plan, weighted))):
        assert whole[:2] == again[:2] == (4 * TAKEN[worker], 24)
        assert torch.equal(whole[2], again[2])


def _changing(worker: int) -> list[Any]:
    training = Training(worker, "diloco(every='10s')")
    found: list[Any] = []

    def note() -> None:
        found.append((training.session.step, training.session.progress, training.weights))

    with training.session as session:
        training.step()
        for call in (session.average_weights, lambda: session.change(laconic.ddp())):
            with pytest.raises(RuntimeError, match=r"in the middle of a round of diloco.*if session\.synced"):
                call()
        training.until(6)
        session.average_weights()  # they are the mean already
        note()
        session.change(laconic.plan("diloco(every='20s')"))
        training.until(15)
        note()
        session.change(laconic.quantized_ddp())
        note()
        for _ in range(3):
            training.step()
        note()
        session.change(laconic.plan("post_local_sgd(every='10s')"))
        training.until(24)
        note()
        session.change(laconic.diloco(period=4))
        for _ in range(5):
            training.step()
        assert session.synced
        note()
    return found


def test_a_plan_changes_after_a_round_and_steps_are_alike_after_it():
    results = run_workers(_changing, 3)
    for worker, found in enumerate(results):
        taken, twice = TAKEN[worker], (20, 10, 5)[worker]
        first = 6 + 35 / 3  # the mean of 20, 10 and 5
        alike = round(first)
        steps = [taken, 6 + twice, alike, alike + 3, alike + 3 + taken, alike + 9 + 5]
        assert [step for step, *_ in found] == steps
        assert [each for _, each, _ in found] == pytest.approx([6, first, alike, alike + 3, alike + 9, alike + 14])
    for each in zip(*results, strict=True):
        assert_equal_bits([vector for *_, vector in each])


def _states(worker: int) -> dict[str, Any]:
    training = Training(worker, "diloco(every='10s')")
    with training.session as session:
        training.until(6)
        return session.state_dict()


def test_states_of_one_round_are_resized():
    states = run_workers(_states, 3)
    for workers in (2, 4):
        made = checkpoint.resize(states, workers)
        assert [state["step"] for state in made] == [10, 5, 3, 10][:workers]
        assert all(state["rounds"] == {"ended": 1, "taken": 0, "progress": 6} for state in made)
    states[1]["rounds"]["ended"] = 2
    with pytest.raises(ValueError, match=r"worker 1 was saved with round 2 and worker 0 with 1"):
        checkpoint.resize(states, 2)


# What does not fit


def test_what_counts_steps_is_refused():
    training = Training(0, "diloco(every='30s')")
    with training.session as session:
        by_steps = (
            r"needs as many steps from all workers, and in a round of diloco\(every='30s'\).*diloco\(period=\.\.\.\)"
        )
        with pytest.raises(PlanError, match=rf"^ElasticSampler {by_steps}"):
            laconic.data.ElasticSampler(100, session, batch=4)
        with pytest.raises(PlanError, match=by_steps):
            laconic.sent_bytes(session.plan, training.module)
        with pytest.raises(PlanError, match=by_steps):
            check_can_save(session)
        with pytest.raises(PlanError, match=by_steps):
            session.observe(laconic.Guard("warn"))


def test_a_module_that_sends_in_its_forward_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    with pytest.raises(ValueError, match=r"^diloco\(every='30s'\): SyncBatchNorm must be computed in the same steps"):
        laconic.attach("diloco(every='30s')", model, torch.optim.SGD(model.parameters(), lr=0.1))


def _sharded(worker: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp(depth=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard")))
    laconic.attach("diloco(every='30s')", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_shards_of_one_replica_step_together():
    with pytest.raises(WorkerError, match=r"every='30s'\): the shards of one replica must(.|\n)*diloco\(period=16\)"):
        run_workers(_sharded, 2)
