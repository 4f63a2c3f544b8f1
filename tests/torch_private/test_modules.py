"""Modules: one quick walk, who holds parameters in a DDP model, and the model inside a compiled one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from laconic.torch_private.modules import ddp_models_of, inside_compiled, tensors_of
from tests.workers import run_workers


def test_the_walk_finds_what_torch_names():
    model = nn.Sequential(
        nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(2, affine=False))
    )
    params, buffers = tensors_of(model)
    assert {id(p) for p in params} == {id(p) for p in model.parameters()}
    assert {id(b) for b in buffers} == {id(b) for b in model.buffers()}


class _Derived(DDP):
    pass


def _wrapped(worker: int) -> None:
    for kind in (DDP, _Derived):
        inner, other = nn.Linear(2, 2), nn.Linear(2, 2)
        ddp = kind(nn.Sequential(inner))
        assert ddp_models_of({id(p) for p in inner.parameters()}) == [ddp]
        assert ddp_models_of({id(p) for p in other.parameters()}) == []
        del ddp
        assert ddp_models_of({id(p) for p in inner.parameters()}) == []


def test_ddp_models_are_found_by_their_parameters():
    run_workers(_wrapped, 1)


def test_shared_tensors_come_as_often_as_they_are_registered():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[1].weight = model[0].weight
    assert len(tensors_of(model)[0]) == 4
    assert torch.equal(tensors_of(model)[0][0], tensors_of(model)[0][2])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_model_inside_a_compiled_one():
    model = nn.Linear(2, 2)
    assert inside_compiled(torch.compile(model)) is model  # type: ignore[arg-type]
    assert inside_compiled(model) is None
