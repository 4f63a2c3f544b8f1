"""Model averagers: when they average, which parameters they accept, and errors when these differ between workers."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from laconic import DisagreementError
from laconic.algorithms.model_averaging.averagers import PeriodicModelAverager
from laconic.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from laconic.algorithms.model_averaging.utils import average_parameters, average_parameters_or_parameter_groups
from tests.workers import WorkerError, run_workers


def _values(worker: int, kind: str, steps: int) -> list[float]:
    """Set a weight to the worker's index before each step, and return its values after them."""
    averager: Any = (
        PeriodicModelAverager(period=4, warmup_steps=2)
        if kind == "periodic"
        else HierarchicalModelAverager(OrderedDict([(2, 2), (4, 4)]), warmup_steps=2)
    )
    p = nn.Parameter(torch.zeros(1))
    values = []
    for _ in range(steps):
        with torch.no_grad():
            p.fill_(float(worker))
        averager.average_parameters([p])
        values.append(float(p.detach()))
    return values


def _both(worker: int) -> tuple[list[float], list[float]]:
    return _values(worker, "periodic", 11), _values(worker, "hierarchical", 9)


def test_phases_are_torchs():
    for worker, (periodic, hierarchical) in enumerate(run_workers(_both, 4)):
        own, pair, whole = float(worker), worker // 2 * 2 + 0.5, 1.5
        assert periodic == [whole if step in (2, 6, 10) else own for step in range(11)]  # from the end of the warm-up
        expected = {2: pair, 4: whole, 6: pair, 8: whole}  # by the step itself; the larger group has precedence
        assert hierarchical == [expected.get(step, own) for step in range(9)]


def _kinds(worker: int) -> list[float]:
    """Average parameters, named parameters and an optimizer's groups. Frozen and integer parameters do not change."""
    results = []
    for kind in ("parameters", "named", "groups", "iterator"):
        model = nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(float(worker))
            model.bias.fill_(float(worker))
        model.bias.requires_grad_(False)
        model.table = nn.Parameter(torch.tensor([worker]), requires_grad=False)
        given: Any = {
            "parameters": list(model.parameters()),
            "named": model.named_parameters(),
            "groups": torch.optim.SGD(model.parameters(), lr=0.1).param_groups,
            "iterator": iter(model.parameters()),
        }[kind]
        average_parameters_or_parameter_groups(given, None)
        assert torch.equal(model.weight, torch.full((2, 2), 0.5)), kind
        assert torch.equal(model.bias, torch.full((2,), float(worker))) and int(model.table) == worker
        results.append(float(model.weight[0, 0].detach()))
    with pytest.raises(NotImplementedError, match=r"type <class 'int'> is not supported: give model.parameters\(\)"):
        average_parameters_or_parameter_groups([1], None)  # type: ignore[arg-type]
    return results


def test_accepted_inputs():
    assert run_workers(_kinds, 2) == [[0.5] * 4] * 2


DIFFERENCES: dict[str, tuple[list[Any], list[Any]]] = {
    "shape": ([(2, 3)], [(3, 2)]),
    "dtype": ([torch.float32], [torch.bfloat16]),
    "number": ([(2,), (2,)], [(2,)]),
    "name": (["weight", "bias"], ["bias", "weight"]),
}


def _parameters(name: str, given: list[Any]) -> list[Any]:
    if name == "dtype":
        return [nn.Parameter(torch.ones(4, dtype=dtype)) for dtype in given]
    if name == "name":
        return [(each, nn.Parameter(torch.ones(4))) for each in given]
    return [nn.Parameter(torch.ones(shape)) for shape in given]


def _error_of(averager: PeriodicModelAverager, parameters: list[Any]) -> str:
    try:
        averager.average_parameters(parameters)
    except DisagreementError as error:
        return str(error)
    return "no error"


def _differ(worker: int) -> dict[str, str]:
    errors = {}
    for name, (usual, other) in DIFFERENCES.items():
        parameters = _parameters(name, other if worker == 1 else usual)
        errors[name] = _error_of(PeriodicModelAverager(period=2), parameters)
    # The group still works: the next averaging, of the same parameters on all workers, succeeds.
    p = nn.Parameter(torch.tensor([float(worker)]))
    average_parameters(iter([p]), dist.group.WORLD)
    assert float(p.detach()) == 1.0
    return errors


def test_different_parameters_raise_the_same_error_on_every_worker():
    per_worker = run_workers(_differ, 3, timeout_s=30)
    for name in DIFFERENCES:
        for errors in per_worker:
            assert errors[name] == per_worker[0][name]
            assert "worker 1 has" in errors[name] and "worker 0 has" in errors[name], f"{name}: {errors[name]}"
            assert "Nothing was averaged" in errors[name]


def _changes_later(worker: int) -> str:
    averager = PeriodicModelAverager(period=2)
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    for _ in range(4):
        averager.average_parameters(parameters)
    return _error_of(averager, parameters[:1] if worker == 0 else parameters)


def test_a_later_change_of_the_parameters_of_one_worker_raises():
    for message in run_workers(_changes_later, 3):
        assert "worker 0 has nothing more, while worker 1 has parameter 1: parameter 1 [3] float32" in message


def _shared_groups(worker: int) -> None:
    averager = HierarchicalModelAverager(OrderedDict([(2, 1), (4, 2)]))
    assert list(averager.period_process_group_dict) == [2, 4]
    assert averager.period_process_group_dict[4] is dist.group.WORLD
    averager.step = 3
    other = copy.deepcopy(averager)
    assert other.step == 3 and other.period_process_group_dict[2] is averager.period_process_group_dict[2]
    other.step = 9
    assert averager.step == 3


def test_copies_share_the_groups():
    run_workers(_shared_groups, 2)


def _invalid(worker: int, levels: list[tuple[int, int]]) -> None:
    HierarchicalModelAverager(OrderedDict(levels))


@pytest.mark.parametrize(
    ("levels", "words"),
    [
        ([(2, 2), (4, 3)], r"must be equal to the size of arg ``process_group`` 2"),
        ([(4, 1), (2, 2)], r"period 2 after 4: periods must be positive and increase"),
    ],
)
def test_errors_name_the_numbers(levels, words):
    with pytest.raises(WorkerError, match=words):
        run_workers(_invalid, 2, (levels,))
