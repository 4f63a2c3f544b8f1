"""`session.change(plan)` carries residuals over: what the old codec has not delivered, the new one does."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.codecs import Codec
from laconic.codecs.feedback import residuals_by_name
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors
from laconic.session.live_model import local_of
from tests.workers import run_workers

FEW = "ErrorFeedback(codec=Quantized(bits=1))"


def _gradients(worker: int, kind: str, new: str, void: bool, steps: int) -> tuple[Tensor, Tensor]:
    """SGD at lr 1 with constant gradients: how far the weights are, and what all gradients together amount to."""
    torch.manual_seed(0)
    module = nn.Linear(16, 8, bias=False)
    start = module.weight.detach().clone()
    model: nn.Module = DistributedDataParallel(module) if kind == "ddp" else module
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(worker))
    with laconic.attach(laconic.plan(f"Plan(codec={FEW})"), model, optimizer) as session:
        for step in range(steps):
            if step == 3:
                session.change(laconic.plan(new))
            nan = torch.nan if void and step == 3 and worker == 1 else 1.0
            (model(x) * nan).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        left = residuals_by_name(session.state_dict()["state"]["gradient"]).get("weight", torch.zeros(8, 16))
    own = x.sum(0).expand(8, 16) * (steps - void)
    if new == "ddp()" and steps > 36:
        assert not left.any()
    return start - module.weight.detach(), own - left


@pytest.mark.parametrize("kind", ["ddp", pytest.param("bare", marks=pytest.mark.slow)])
@pytest.mark.parametrize("void", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("new", ["ddp()", "power_sgd(rank=1, bits=None)", f"Plan(codec={FEW.replace('1', '4')})"])
def test_residuals_of_gradients_are_delivered_by_any_codec(kind, new, void):
    for steps in (5, 38):  # while they are delivered, and after it
        _check(run_workers(_gradients, 2, (kind, new, void, steps)))


def _check(results: list[tuple[Tensor, Tensor]]) -> None:
    truth = torch.stack([sent for _, sent in results]).mean(0)
    for moved, _ in results:
        torch.testing.assert_close(moved, truth, rtol=1e-4, atol=1e-4)


def _model(kind: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module, dist.ProcessGroup | None]:
    torch.manual_seed(0)
    module = nn.Linear(48, 40, bias=False, dtype=dtype)
    own = copy.deepcopy(module)
    if kind == "ddp":
        return DistributedDataParallel(module), own, None
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(module, mesh=mesh["shard"])
        return module, own, mesh["replicate"].get_group()
    return module, own, None


@dataclass(frozen=True)
class Watched:
    """Adds up what a codec is given."""

    codec: Codec
    total: Tensor

    def accepts(self, shape: torch.Size) -> bool:
        return self.codec.accepts(shape)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        self.total.add_(tensors["weight"])
        return (yield from self.codec.average(tensors, state, peers, reuse=reuse))


def _law(worker: int, kind: str, dtype: torch.dtype, last: str) -> tuple[Tensor, Tensor, Tensor, float]:
    """Change twice; return, in fp64: own gradients, delivered ones, residuals, and the largest residual on the way.

    `ddp()` keeps no residual of what it rounds itself, so there that counts as delivered which it is given.
    """
    model, own, group = _model(kind, dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(worker)
    true, delivered = torch.zeros(40, 48, dtype=torch.float64), torch.zeros(40, 48, dtype=torch.float64)
    residual, largest = true, 0.0
    with laconic.attach("power_sgd(rank=1, bits=2)", model, optimizer, group=group) as session:
        for step in range(52):
            if step in (4, 8):
                session.change(laconic.plan("quantized_ddp(bits=2)" if step == 4 else last))
                if session.plan == laconic.ddp():
                    session.wrap_codec(partial(Watched, total=delivered))
            x, y = torch.randn(8, 48, generator=generator), torch.randn(8, 40, generator=generator)
            for each in (model, own):
                (each(x.to(dtype)) * y.to(dtype)).sum().backward()
            optimizer.step()
            true += grad_of(own).double()
            if session.plan != laconic.ddp():
                delivered += grad_of(model).double()
            for each in (model, own):
                each.zero_grad()
            residual = residuals_by_name(session.state_dict()["state"]["gradient"]).get("weight", torch.zeros(40, 48))
            largest = max(largest, float(residual.abs().max()))
    return true, delivered, residual.double(), largest


def grad_of(model: nn.Module) -> Tensor:
    (p,) = model.parameters()
    assert p.grad is not None
    return local_of(p.grad)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("bare", torch.bfloat16),
        ("ddp", torch.float16),
        *(
            pytest.param(kind, dtype, marks=pytest.mark.slow)
            for kind in ("ddp", "bare", "fsdp")
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
            if (kind, dtype) not in (("bare", torch.bfloat16), ("ddp", torch.float16))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("last", ["ddp()", "quantized_ddp(bits=4)"])
def test_what_is_delivered_and_what_is_left_are_the_truth_in_fp32(kind, dtype, last):
    results = run_workers(_law, 2, (kind, dtype, last))
    truth = torch.stack([true for true, _, _, _ in results]).mean(0)
    delivered = torch.stack([each for _, each, _, _ in results]).mean(0)
    residual = torch.stack([left for _, _, left, _ in results]).mean(0)
    for _, _, left, largest in results:
        assert largest > 1
        assert float((delivered + residual - truth).abs().max()) < 1e-5 * largest
        assert last != "ddp()" or left.any() == (dtype != torch.float32)  # what rounding has left of the last share


def _deltas(worker: int, new: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Linear(16, 8, bias=False)
    start = module.weight.detach().clone()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(worker))
    with laconic.attach(laconic.plan(f"Plan(schedule=Every(2), codec={FEW})"), module, optimizer) as session:
        for _ in range(4):
            module(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.change(laconic.plan(new))
    return start - module.weight.detach(), x.sum(0).expand(8, 16) * 4


@pytest.mark.parametrize("new", ["ddp()", "post_local_sgd(period=2)"])
def test_residuals_of_deltas_are_averaged_where_the_plan_changes(new):
    results = run_workers(_deltas, 2, (new,))
    truth = torch.stack([own for _, own in results]).mean(0)
    for moved, _ in results:
        torch.testing.assert_close(moved, truth, rtol=1e-5, atol=1e-5)
