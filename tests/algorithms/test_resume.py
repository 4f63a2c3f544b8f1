"""A run resumed at step 6 with new objects is bit-identical to the uninterrupted run for the next 20 steps."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from laconic.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from laconic.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from tests.algorithms.implementations import ReverseOrder, hooked, saved_and_loaded, sgd, train
from tests.session.models import weights
from tests.workers import run_workers

METHODS = ["PowerSGD", "batched PowerSGD", "PowerSGD without warm start", "post-local SGD", "periodic", "hierarchical"]
SAVED_AT, STEPS = 6, 26


class Run:
    """Model, optimizer, hook state and averager of one method."""

    def __init__(self, method: str, alone: dist.ProcessGroup, hook_state: Any = None) -> None:
        self.module = ReverseOrder()
        workers = dist.get_world_size()
        self.averager: ModelAverager | None = None
        hook: Any = post_localSGD_hook
        if "PowerSGD" in method:
            hook = batched_powerSGD_hook if "batched" in method else powerSGD_hook
            warm_start = "without" not in method
            state: Any = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=3, warm_start=warm_start)
        elif method == "post-local SGD":
            state = PostLocalSGDState(None, alone, 8)
            self.averager = PeriodicModelAverager(period=3, warmup_steps=8)
        else:
            state = PostLocalSGDState(None, alone, 2, post_local_gradient_allreduce=False)
            levels = OrderedDict([(2, workers // 2), (4, workers)])
            self.averager = (
                PeriodicModelAverager(period=4, warmup_steps=2)
                if method == "periodic"
                else HierarchicalModelAverager(levels, warmup_steps=2)
            )
        self.state = hook_state or state
        self.model = hooked(self.module, self.state, hook, bucket_cap_mb=0.008)
        self.optimizer = sgd(self.model, momentum=0.9)

    def train(self, worker: int, steps: range) -> Tensor:
        train(self.model, self.optimizer, worker, steps, self.averager)
        return weights(self.module)

    def state_dict(self) -> dict[str, Any]:
        saved = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved["hook"] = self.state.state_dict()
        saved["averager"] = {} if self.averager is None else self.averager.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any], hook: bool = True, averager: bool = True) -> None:
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # it would share the tensors
        if hook:
            self.state.load_state_dict(saved["hook"])
        if self.averager is not None and averager:
            self.averager.load_state_dict(saved["averager"])


def _resumed(worker: int) -> dict[str, list[bool]]:
    """Return for each method whether the run resumed from a state dict, from a pickle or without state is exact."""
    alone = dist.new_group([worker], use_local_synchronization=True)
    results = {}
    for method in METHODS:
        uninterrupted = Run(method, alone).train(worker, range(STEPS))
        half = Run(method, alone)
        half.train(worker, range(SAVED_AT))
        saved = saved_and_loaded(half.state_dict())
        state = pickle.loads(pickle.dumps(half.state))  # noqa: S301 - pickled in this line
        if isinstance(state, PostLocalSGDState):
            state.subgroup = alone

        resumed, unpickled, stateless = Run(method, alone), Run(method, alone, state), Run(method, alone)
        resumed.load_state_dict(saved)
        unpickled.load_state_dict(saved, hook=False)
        stateless.load_state_dict(saved, hook=False, averager=False)
        runs = (resumed, unpickled, stateless)
        results[method] = [torch.equal(uninterrupted, run.train(worker, range(SAVED_AT, STEPS))) for run in runs]
    return results


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_resumed_runs_are_bit_identical(workers):
    for results in run_workers(_resumed, workers, timeout_s=120):
        for method, (resumed, unpickled, stateless) in results.items():
            assert resumed, f"{method}: the resumed run differs"
            assert unpickled, f"{method}: the run resumed from a pickle differs"
            assert not stateless, f"{method}: the state makes no difference, so this test shows nothing"
