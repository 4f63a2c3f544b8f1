"""How many functions and files of ours lie between a tensor and its collective: few enough to read in one go."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.exchange import Mean
from tests.session.models import batch, mlp
from tests.workers import run_workers

HOME = str(Path(laconic.__file__).parent)
Functions = set[tuple[str, str]]


class _Recorder:
    """Follows a tensor from the call of `first` to that of torch's all_reduce.

    `chain` are the functions on the stack when its exchange was submitted, when the exchange requested the mean, and
    when the collective was launched: the way itself. `called` are all functions of laconic that were called meanwhile.
    Comprehensions and lambdas are parts of the function that they stand in.
    """

    def __init__(self, first: str) -> None:
        self.first = first
        self.armed = self.on = False
        self.called: Functions = set()
        self._stacks: dict[str, Functions] = {}
        sys.setprofile(self)
        threading.setprofile(self)  # for the thread that launches collectives

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self.armed or event != "call":
            return
        name, file = frame.f_code.co_qualname, frame.f_code.co_filename
        self.on |= name == self.first
        if not self.on:
            return
        if name in ("CollectiveQueue.submit_all", "all_reduce"):
            self._stacks[name] = self._stack(frame)
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), Mean):
            self._stacks["Mean"] = self._stack(frame)
        if name == "all_reduce" and "Mean" in self._stacks:  # that of a header comes before
            self.armed = self.on = False
        elif file.startswith(HOME) and not frame.f_code.co_name.startswith("<"):
            self.called.add((file.removeprefix(HOME), name))

    def _stack(self, frame: FrameType | None) -> Functions:
        found = set()
        while frame is not None:
            code = frame.f_code
            if code.co_filename.startswith(HOME) and not code.co_name.startswith("<"):
                found.add((code.co_filename.removeprefix(HOME), code.co_qualname))
            frame = frame.f_back
        return found

    @property
    def chain(self) -> Functions:
        return set().union(*self._stacks.values())


def _way(worker: int, plan: str, wrapped: bool, first: str) -> tuple[Functions, Functions]:
    recorder = _Recorder(first)
    module = mlp()
    model: nn.Module = DDP(module) if wrapped else module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.plan(plan), model, optimizer):
        for step in range(8):
            recorder.armed = step == 7  # threads run, and DDP has rebuilt its buckets
            x, y = batch(worker, step)
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    sys.setprofile(None)
    assert not recorder.armed, "there was no all_reduce"
    return recorder.chain, recorder.called


def test_a_gradient_from_ddps_hook_to_its_collective():
    for chain, called in run_workers(_way, 2, ("ddp()", True, "_average_bucket")):
        assert ("/session/ddp.py", "_average_bucket") in chain and ("/comm/collectives.py", "launch") in chain
        assert len(called) <= 20, sorted(called)
        assert len({file for file, _ in called}) <= 8, sorted(called)
        assert len(chain) <= 20 and len({file for file, _ in chain}) <= 8, sorted(chain)


def test_a_weight_from_the_optimizers_hook_to_its_collective():
    for chain, _ in run_workers(_way, 2, ("post_local_sgd(period=4)", False, "Session._after_step")):
        assert ("/session/session.py", "Session._after_step") in chain and ("/comm/collectives.py", "launch") in chain
        assert len(chain) <= 15, sorted(chain)
        assert len({file for file, _ in chain}) <= 6, sorted(chain)
