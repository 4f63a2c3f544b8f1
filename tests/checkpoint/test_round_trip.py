"""What is loaded is what was saved, bit for bit."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from laconic import checkpoint
from laconic.checkpoint.state import flatten, unflatten
from tests.checkpoint.trees import KEYS, rich, same


@pytest.mark.parametrize("wait", [True, False])
def test_everything_comes_back_bit_for_bit(tmp_path, wait):
    assert checkpoint.save(tmp_path, rich(), step=7, wait=wait).wait()
    saved = checkpoint.load(tmp_path)
    assert same(saved.state, rich())
    assert (saved.step, saved.worker, saved.workers, saved.skipped) == (7, 0, 1, ())
    assert checkpoint.verify(tmp_path) == checkpoint.checkpoints(tmp_path)
    assert [each.good for each in checkpoint.verify(tmp_path)] == [True]


@pytest.mark.parametrize(
    "state",
    [
        torch.arange(3),
        [torch.arange(2), 1],
        5,
        None,
        "text",
        {"a": {"b": torch.zeros(1), "b#2": torch.ones(1)}, "a/b": torch.full((1,), 2.0), "__metadata__": torch.ones(2)},
    ],
)
def test_any_value_can_be_the_state(tmp_path, state):
    checkpoint.save(tmp_path, state, step=1)
    assert same(checkpoint.load(tmp_path).state, state)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_complex_numbers_of_half_precision(tmp_path):
    state = torch.tensor([1 + 2j, -0.5j]).to(torch.complex32)
    checkpoint.save(tmp_path, state, step=1)
    assert same(checkpoint.load(tmp_path).state, state)


def test_keys_never_become_paths(tmp_path):
    state = {key: {again: torch.full((2,), float(i)) for again in KEYS} for i, key in enumerate(KEYS)}
    checkpoint.save(tmp_path / "outer" / "folder", state, step=1)
    assert same(checkpoint.load(tmp_path / "outer" / "folder").state, state)
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file())
    place = "outer/folder/step-00000001"
    assert files == [f"{place}/manifest.json", f"{place}/worker-00000.safetensors"]


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).to(dtype).view(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e8m0fnu]),
)
trees = st.recursive(
    leaves | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=100, deadline=None)
@given(tree=trees)
def test_any_tree_comes_back(tree):
    skeleton, flat = flatten(tree)
    assert same(unflatten(json.loads(json.dumps(skeleton, allow_nan=False)), flat), tree)


def test_a_model_and_an_optimizer_come_back(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9), foreach=False)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, [model.state_dict(), optimizer.state_dict()], step=1)
    weights, moments = checkpoint.load(tmp_path).state
    model.load_state_dict(weights)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(moments)
    assert same(other.state_dict(), optimizer.state_dict())


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            np.float64(0.5),
            r"state\['a'\]\[0\] has the type numpy.float64, which a checkpoint does not hold. Save dicts",
        ),
        (np.zeros(2), "has the type numpy.ndarray"),
        (Number(3), "has the type tests.checkpoint.*Number"),
        (b"bytes", "has the type bytes"),
        ({1, 2}, "has the type set"),
        (torch.float32, "has the type torch.dtype"),
        (torch.Size([1]), "has the type torch.Size"),
        ({(1, 2): 3}, r"has the key \(1, 2\): keys must be strings or ints"),
        ({True: 3}, "has the key True"),
        (torch.eye(3).to_sparse(), r"layout torch.sparse_coo on cpu, which a checkpoint does not hold. Save a dense"),
        (torch.empty(3, device="meta"), "on meta"),
        (torch.empty(3, dtype=torch.bits8), "of torch.bits8"),
    ],
)
def test_what_cannot_come_back_is_refused_at_once(tmp_path, value, text):
    checkpoint.save(tmp_path, 1, step=1)
    for wait in (True, False):
        with pytest.raises(TypeError, match=text):
            checkpoint.save(tmp_path, {"a": [value]}, step=2, wait=wait)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_a_state_that_contains_itself_is_refused(tmp_path):
    state: list[object] = []
    state.append(state)
    with pytest.raises(TypeError, match="nested more than 64 deep, or contains itself"):
        checkpoint.save(tmp_path, state, step=1)


def test_other_tools_can_read_the_tensors(tmp_path):
    tensors = {"w": torch.arange(4, dtype=torch.bfloat16), "..": torch.tensor([True]), "none": torch.empty(0, 2)}
    checkpoint.save(tmp_path, {"model": tensors}, step=1)
    path = tmp_path / "step-00000001" / "worker-00000.safetensors"
    assert same(
        dict(sorted(safetensors.torch.load_file(path).items())), {f"model/{k}": tensors[k] for k in sorted(tensors)}
    )
    assert path.stat().st_mode == (path.parent / "manifest.json").stat().st_mode


def test_loaded_tensors_have_memory_of_their_own(tmp_path):
    saved = {"a": torch.zeros(3), "b": torch.zeros(1000)}
    checkpoint.save(tmp_path, saved, step=1)
    state = checkpoint.load(tmp_path).state
    assert state["a"].untyped_storage().nbytes() == 12
    state["a"].add_(1)
    state["b"].resize_(2000)  # FSDP resizes what it shards
    saved["a"].add_(1).resize_(100)
    assert checkpoint.load(tmp_path).state["a"].tolist() == [0.0] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wait", [True, False])
def test_tensors_on_a_gpu_are_saved_as_they_are_now_and_loaded_on_the_cpu(tmp_path, wait):
    weights = torch.arange(1000.0, device="cuda").view(10, 100)
    state = {"w": weights, "t": weights.t(), "b": weights.bfloat16(), "scalar": weights[0, 1], "c": weights * 1j}
    expected = {name: t.cpu().clone() for name, t in state.items()}
    saving = checkpoint.save(tmp_path, state, step=1, wait=wait)
    weights.zero_()
    assert saving.wait()
    assert same(checkpoint.load(tmp_path).state, expected)
