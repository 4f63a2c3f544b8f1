"""Defects D13 to D18 of torch's model averagers. See `docs/twin.md`."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.algorithms.implementations import (
    Collectives,
    averagers,
    averaging,
    defect,
    hierarchical,
    post_local,
    sgd,
    train,
)
from tests.workers import run_workers


def _average(implementation: str, parameters: Any) -> None:
    averaging(implementation).average_parameters_or_parameter_groups(parameters, None)


def _gradients_on_different_parameters(worker: int, implementation: str) -> list[float]:
    """Worker 0 has a gradient for the first parameter only, worker 1 for the second; the third has none."""
    first, second, third = (
        nn.Parameter(torch.tensor(value)) for value in ([1.0, 50.0, 7.0], [3.0, 100.0, 9.0])[worker]
    )
    (second if worker else first).sum().backward()
    _average(implementation, [first, second, third])
    return [float(p.detach()) for p in (first, second, third)]


@defect(torch_shows=r"averaged to \[50.5, 50.0, 7.0\]")
def test_d13_what_is_averaged_does_not_depend_on_gradients(implementation):
    for found in run_workers(_gradients_on_different_parameters, 2, (implementation,)):
        assert found == [2.0, 75.0, 8.0], f"1 and 3, 50 and 100, 7 and 9 averaged to {found}"


def _after_zero_grad(worker: int, implementation: str) -> float:
    p = nn.Parameter(torch.tensor([float(worker)]))
    p.sum().backward()
    torch.optim.SGD([p], lr=0.0).zero_grad()
    _average(implementation, [p])
    return float(p.detach())


@defect(torch_shows="torch.cat")
def test_d13_averaging_after_zero_grad(implementation):
    assert run_workers(_after_zero_grad, 2, (implementation,)) == [0.5, 0.5]


def _different_order(worker: int, implementation: str) -> str:
    parameters = [nn.Parameter(torch.full(shape, float(index))) for index, shape in enumerate([(2, 3), (3, 2)])]
    for p in parameters:
        p.sum().backward()
    try:
        _average(implementation, parameters[:: -1 if worker else 1])
    except RuntimeError as error:
        return str(error)
    return f"silently averaged to {[p.detach().unique().tolist() for p in parameters]}"


@defect(torch_shows="silently averaged")
def test_d14_a_different_order_raises(implementation):
    for message in run_workers(_different_order, 3, (implementation,)):
        assert "worker 1 has parameter 0: parameter 0 [3, 2]" in message and "worker 0 has" in message, message


def _memory_after_averaging(worker: int, implementation: str) -> dict[str, bool]:
    linear = nn.Linear(8, 4)
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model = nn.Sequential(conv, nn.Flatten(), linear)
    model(torch.randn(2, 3, 3, 3)).sum().backward()
    view = linear.weight.detach()
    before = [(p.data_ptr(), p.stride()) for p in model.parameters()]
    _average(implementation, model.parameters())
    file = io.BytesIO()
    torch.save(linear.weight, file)
    return {
        "addresses kept": [a for a, _ in before] == [p.data_ptr() for p in model.parameters()],
        "strides kept": [s for _, s in before] == [p.stride() for p in model.parameters()],
        "views follow": torch.equal(view, linear.weight.detach()) and view.data_ptr() == linear.weight.data_ptr(),
        "storage not shared": linear.weight.untyped_storage().nbytes() == 4 * 8 * 4,
    }


@defect(torch_shows="addresses kept.*strides kept.*views follow.*storage not shared")
def test_d15_parameters_keep_their_memory(implementation):
    for found in run_workers(_memory_after_averaging, 2, (implementation,)):
        failed = [property for property, holds in found.items() if not holds]
        assert not failed, f"not true after averaging: {failed}"


def _equal_replicas(worker: int, implementation: str) -> dict[str, bool]:
    unchanged = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        torch.manual_seed(0)
        p = nn.Parameter((torch.randn(500) * 1e-3).to(dtype))
        before = p.detach().clone()
        p.sum().backward()
        _average(implementation, [p])
        unchanged[str(dtype)] = torch.equal(before, p.detach())
    return unchanged


@defect(torch_shows="equal replicas changed in .'torch.float32', 'torch.bfloat16', 'torch.float16'")
def test_d16_equal_replicas_stay_equal(implementation):
    for unchanged in run_workers(_equal_replicas, 3, (implementation,)):
        changed = [dtype for dtype, same in unchanged.items() if not same]
        assert not changed, f"equal replicas changed in {changed}"


def _mixed_dtypes(worker: int, implementation: str) -> int:
    """Return the bytes that collectives send for 2000 bytes of bf16 and 40 of fp32."""
    parameters = [nn.Parameter(torch.ones(1000, dtype=torch.bfloat16)), nn.Parameter(torch.ones(10))]
    for p in parameters:
        p.sum().backward()
    _average(implementation, parameters)  # the first call also compares the parameters of the workers
    seen = Collectives.watch()
    _average(implementation, parameters)
    return sum(seen.sizes_bytes)


@defect(torch_shows="4040 bytes")
def test_d16_each_dtype_is_sent_separately(implementation):
    for sent in run_workers(_mixed_dtypes, 2, (implementation,)):
        # bf16 is summed in fp32: all_to_all of the numbers, then all_gather of the means; and 4 bytes of control.
        assert sent == 2000 + 1000 + 40 + 4, f"{sent} bytes for 2000 of bf16 and 40 of fp32"


def _batch_norm(worker: int, implementation: str) -> tuple[int, list[Tensor]]:
    """Average the weights after the third local step. Return the broadcasts, and the running mean after each step."""
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    optimizer = sgd(model, lr=0.1)
    averager = None
    if implementation == "laconic":
        laconic.attach(laconic.post_local_sgd(period=3), model, optimizer)
    else:
        hook = post_local(implementation)
        model.register_comm_hook(hook.PostLocalSGDState(None, None, 0, False), hook.post_localSGD_hook)
        averager = averagers(implementation).PeriodicModelAverager(period=3)
        averager.step = 1  # so that it averages after the third step
    plain, broadcasts = dist._broadcast_coalesced, []  # type: ignore[attr-defined]

    def counted(*args: Any) -> None:
        broadcasts.append(args)
        plain(*args)

    dist._broadcast_coalesced = counted  # type: ignore[attr-defined,assignment]
    means = []
    for step in range(3):
        train(model, optimizer, worker, [step], averager)
        means.append(model.module[1].running_mean.clone())
    return len(broadcasts), means


@defect(torch_shows=r"\d+ broadcasts of buffers in 3 local steps")
def test_d17_buffers_are_averaged_and_not_broadcast(implementation):
    (broadcasts, first), (_, second) = run_workers(_batch_norm, 2, (implementation,))
    assert torch.equal(first[-1], second[-1]), (
        f"buffers differ after averaging; {broadcasts} broadcasts of buffers in 3 local steps"
    )
    assert not torch.equal(first[0], second[0]), "buffers are equal after a local step"
    assert not broadcasts


HIERARCHIES: dict[str, list[tuple[int, int]]] = {
    "unsorted periods": [(4, 2), (2, 4)],
    "a period of 0": [(2, 2), (0, 4)],
    "a smaller group on a longer period": [(2, 4), (4, 2), (8, 4)],
    "negative period": [(2, 2), (-4, 4)],
}


def _hierarchies(worker: int, implementation: str) -> list[str]:
    accepted = []
    for name, levels in HIERARCHIES.items():
        try:
            hierarchical(implementation).HierarchicalModelAverager(OrderedDict(levels))
        except ValueError as error:
            if str(levels[1][0]) not in str(error) and str(levels[1][1]) not in str(error):
                accepted.append(f"{name}, an error without the numbers: {error}")
        else:
            accepted.append(name)
    return accepted


@defect(torch_shows="accepted: .*unsorted periods.*a period of 0.*a smaller group on a longer period.*negative period")
def test_d18_invalid_hierarchies_raise(implementation):
    for accepted in run_workers(_hierarchies, 4, (implementation,)):
        assert not accepted, f"accepted: {accepted}"


def _two_data_parallel_groups(worker: int, implementation: str) -> float:
    """Workers 0 and 1 average in two levels, workers 2 and 3 in one, independently of each other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    levels = OrderedDict([(1, 1), (2, 2)] if worker < 2 else [(2, 2)])
    averager = hierarchical(implementation).HierarchicalModelAverager(levels, process_group=groups[worker // 2])
    p = nn.Parameter(torch.tensor([float(worker)]))
    p.sum().backward()
    averager.average_parameters([p])
    total = p.detach().clone()
    dist.all_reduce(total, group=dist.new_group())  # a group of all four still works
    assert float(total) == 6.0
    return float(p.detach())


@defect(torch_shows="did not end within|raised:|died with exit code")
def test_d18_two_groups_in_one_world(implementation):
    assert run_workers(_two_data_parallel_groups, 4, (implementation,), timeout_s=20) == [0.5, 0.5, 2.5, 2.5]
