"""The examples in torch's docstrings of the averagers run with only their imports changed.

The code is that of the installed torch. The tests supply the names that it does not define (`rank`, `optimizer`,
`loss_fn`, `output`) and replace GPUs and NCCL.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.algorithms.implementations import averagers, hierarchical
from tests.session.models import assert_equal_bits
from tests.workers import run_workers

WORKERS = 4


def _example(documented: Any) -> str:
    """Extract the code after `>>>`, which torch also writes before continuation lines."""
    lines = [line.strip() for line in (inspect.getdoc(documented) or "").splitlines()]
    code = "\n".join(line.removeprefix(">>>").removeprefix(" ") for line in lines if line.startswith(">>>"))
    assert "average_parameters" in code, "torch's docstring has changed"
    return code


def _moved(code: str) -> str:
    moved, count = re.subn(r"torch\.distributed\.algorithms", "laconic.algorithms", code)
    assert count == 2, f"{count} imports changed"
    return moved


class _Names:
    """The names that the example does not define: data, a loss, and an optimizer of the example's model."""

    def __init__(self, rank: int) -> None:
        self.names: dict[str, Any] = {"rank": rank, "labels": torch.zeros(4, 1), "loss_fn": self.loss, "output": None}
        self.names["optimizer"] = self
        self.inner: torch.optim.Optimizer | None = None
        self.worker, self.steps = rank, 0

    @property
    def model(self) -> nn.Module:
        found: nn.Module = self.names["model"]
        return found

    def loss(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * self.steps + self.worker)
        loss: torch.Tensor = (self.model(torch.randn(4, 1, generator=generator)) - labels).square().mean()
        return loss

    def zero_grad(self) -> None:
        if self.inner is None:
            self.inner = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.inner.zero_grad()

    def step(self) -> None:
        assert self.inner is not None
        self.inner.step()
        self.steps += 1


def _run(worker: int, code: str) -> tuple[torch.Tensor, int, int]:
    """Run the example on the CPU as if it had GPUs."""
    plain_ddp = nn.parallel.DistributedDataParallel
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)
        patch.setattr(torch.cuda, "set_device", lambda _: None)
        patch.setattr(nn.Module, "cuda", lambda self, *_: self)
        patch.setattr(nn.Module, "to", lambda self, *_, **__: self)
        patch.setattr(nn.parallel, "DistributedDataParallel", lambda module, **_: plain_ddp(module))
        patch.setattr(dist, "new_subgroups", lambda: (dist.new_group([worker], use_local_synchronization=True), []))
        defined = _Names(worker)
        torch.manual_seed(0)
        exec(code, defined.names)  # noqa: S102 - torch's own example
    return next(defined.model.parameters()).detach().clone(), defined.steps, defined.names["averager"].step


def test_the_periodic_example():
    code = _moved(_example(averagers("torch").PeriodicModelAverager))
    # The example uses two names that it does not import.
    code = "from laconic.algorithms.ddp_comm_hooks.post_localSGD_hook import *\n" + code
    results = run_workers(_run, WORKERS, (code,))
    assert [steps for _, *steps in results] == [[200, 200]] * WORKERS
    # Without a subgroup, gradients are averaged within the machine, which is all workers here.
    assert_equal_bits([weight for weight, *_ in results])


def _hierarchical(steps: int = 200) -> str:
    """Return the example for `WORKERS` workers, stopped after `steps`."""
    code = _moved(_example(hierarchical("torch").HierarchicalModelAverager))
    code, count = re.subn(r"\(4, 8\), \(16, 16\)", f"(4, {WORKERS // 2}), (16, {WORKERS})", code)
    assert count == 1 and "range(0, 200)" in code, "the example has changed"
    return code.replace("range(0, 200)", f"range(0, {steps})")


@pytest.mark.slow  # the next test runs its first half
def test_the_hierarchical_example():
    results = run_workers(_run, WORKERS, (_hierarchical(),))
    assert [steps for _, *steps in results] == [[200, 200]] * WORKERS
    # The last averaging, of pairs, was at step 196, so all workers differ at the end.
    assert len({float(weight) for weight, *_ in results}) == WORKERS


def _stopped(worker: int, codes: list[str]) -> list[torch.Tensor]:
    return [_run(worker, code)[0] for code in codes]


def test_replicas_are_equal_after_an_averaging():
    results = run_workers(_stopped, WORKERS, ([_hierarchical(105), _hierarchical(113)],))
    pairs = [pair for pair, _ in results]  # after step 104, which 4 divides
    assert_equal_bits(pairs[:2])
    assert_equal_bits(pairs[2:])
    assert not torch.equal(pairs[0], pairs[2])
    assert_equal_bits([whole for _, whole in results])  # after step 112, which 16 divides
