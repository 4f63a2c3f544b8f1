"""Saved at step 6 and resumed with new objects: the next 20 steps are those of the uninterrupted run, bit for bit."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from laconic.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, batched_powerSGD_hook, powerSGD_hook
from laconic.algorithms.model_averaging.averagers import ModelAverager, PeriodicModelAverager
from laconic.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from tests.algorithms.implementations import saved_and_loaded
from tests.session.models import batch, weights
from tests.workers import run_workers

METHODS = ["PowerSGD", "batched PowerSGD", "PowerSGD without warm start", "post-local SGD", "periodic", "hierarchical"]
SAVED_AT, STEPS = 6, 26


class Backwards(nn.Module):
    """Registered in another order than used, so that DDP lays its buckets out anew after the first backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.middle, self.first = nn.Linear(40, 4), nn.Linear(48, 40), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return result


class Run:
    """One training: model, optimizer and what the method adds."""

    def __init__(self, method: str, alone: dist.ProcessGroup, hook_state: Any = None) -> None:
        self.module = Backwards()
        self.model = DDP(self.module, bucket_cap_mb=0.008)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.state: Any = hook_state
        self.averager: ModelAverager | None = None
        workers = dist.get_world_size()
        if "PowerSGD" in method:
            warm = "without" not in method
            self.state = hook_state or PowerSGDState(
                None, matrix_approximation_rank=2, start_powerSGD_iter=3, warm_start=warm
            )
            self.model.register_comm_hook(self.state, batched_powerSGD_hook if "batched" in method else powerSGD_hook)
            return
        if method == "post-local SGD":
            self.state = hook_state or PostLocalSGDState(None, alone, 8)
            self.averager = PeriodicModelAverager(period=3, warmup_steps=8)
        else:
            self.state = hook_state or PostLocalSGDState(None, alone, 2, post_local_gradient_allreduce=False)
            levels = OrderedDict([(2, workers // 2), (4, workers)])
            self.averager = (
                PeriodicModelAverager(period=4, warmup_steps=2)
                if method == "periodic"
                else HierarchicalModelAverager(levels, warmup_steps=2)
            )
        self.model.register_comm_hook(self.state, post_localSGD_hook)

    def train(self, worker: int, steps: range) -> None:
        for step in steps:
            x, y = batch(worker, step)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            if self.averager is not None:
                self.averager.average_parameters(self.model.parameters())

    def state_dict(self) -> dict[str, Any]:
        saved = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved["hook"] = self.state.state_dict()
        saved["averager"] = {} if self.averager is None else self.averager.state_dict()
        return saved

    def load_state_dict(self, saved: dict[str, Any], hook: bool = True) -> None:
        self.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))  # it would share its tensors
        if hook:
            self.state.load_state_dict(saved["hook"])
        if self.averager is not None:
            self.averager.load_state_dict(saved["averager"])


def _resumed(worker: int) -> dict[str, tuple[bool, bool, bool]]:
    """For each method: whether the runs resumed from a state dict, a pickle, and without state are the whole one."""
    alone = dist.new_group([worker], use_local_synchronization=True)
    results = {}
    for method in METHODS:
        whole = Run(method, alone)
        whole.train(worker, range(STEPS))
        half = Run(method, alone)
        half.train(worker, range(SAVED_AT))
        saved, pickled = saved_and_loaded(half.state_dict()), pickle.dumps(half.state)

        resumed = Run(method, alone)
        resumed.load_state_dict(saved)
        resumed.train(worker, range(SAVED_AT, STEPS))

        state = pickle.loads(pickled)  # noqa: S301 - made above
        if isinstance(state, PostLocalSGDState):
            state.subgroup = alone
        unpickled = Run(method, alone, state)
        unpickled.load_state_dict(saved, hook=False)
        unpickled.train(worker, range(SAVED_AT, STEPS))

        forgetful = Run(method, alone)  # without the method's own state
        forgetful.module.load_state_dict(saved["model"])
        forgetful.optimizer.load_state_dict(copy.deepcopy(saved["optimizer"]))
        forgetful.train(worker, range(SAVED_AT, STEPS))
        found = [torch.equal(weights(whole.module), weights(run.module)) for run in (resumed, unpickled, forgetful)]
        results[method] = (found[0], found[1], found[2])
    return results


@pytest.mark.parametrize("workers", [2, 4])
def test_resumed_runs_are_bit_identical(workers):
    for results in run_workers(_resumed, workers, timeout_s=120):
        for method, (resumed, unpickled, forgetful) in results.items():
            assert resumed, f"{method}: the resumed run differs"
            assert unpickled, f"{method}: the run resumed from a pickle differs"
            assert not forgetful, f"{method}: its state makes no difference, so this test shows nothing"
