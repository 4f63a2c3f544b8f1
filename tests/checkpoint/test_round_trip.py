"""What is loaded is what was saved: the very same nest, bit for bit."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from laconic import checkpoint
from laconic.checkpoint import CheckpointError
from laconic.checkpoint.files import opened, parse_json, to_json, write_file
from laconic.checkpoint.nest import decode, encode
from laconic.checkpoint.tensors import TensorFile, chunks
from tests.checkpoint.nests import KEYS, rich, same


@pytest.mark.parametrize("wait", [True, False])
def test_everything_comes_back_bit_for_bit(tmp_path, wait):
    assert checkpoint.save(tmp_path, rich(), step=7, wait=wait).wait()
    saved = checkpoint.load(tmp_path)
    assert same(saved.state, rich())
    assert (saved.step, saved.worker, saved.workers, saved.skipped) == (7, 0, 1, ())
    assert checkpoint.verify(tmp_path) == checkpoint.generations(tmp_path)
    assert [generation.good for generation in checkpoint.verify(tmp_path)] == [True]


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_precision_complex_numbers(tmp_path):
    state = torch.tensor([1 + 2j, -0.5j]).to(torch.complex32)
    checkpoint.save(tmp_path, state, step=1)
    assert same(checkpoint.load(tmp_path).state, state)


def test_keys_are_never_paths(tmp_path):
    folder = tmp_path / "outer" / "folder"
    state = {key: {again: torch.full((2,), float(i)) for again in KEYS} for i, key in enumerate(KEYS)}
    checkpoint.save(folder, state, step=1)
    assert same(checkpoint.load(folder).state, state)
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == [
        "outer",
        "outer/folder",
        "outer/folder/step-00000001",
        "outer/folder/step-00000001/manifest.json",
        "outer/folder/step-00000001/manifest.sha256",
        "outer/folder/step-00000001/worker-00000.json",
        "outer/folder/step-00000001/worker-00000.safetensors",
    ]


def test_names_that_meet_are_told_apart(tmp_path):
    state = {
        "a": {"b": torch.zeros(1), "b#2": torch.ones(1)},
        "a/b": torch.full((1,), 2.0),
        "__metadata__": torch.ones(2),
    }
    checkpoint.save(tmp_path, state, step=1)
    assert same(checkpoint.load(tmp_path).state, state)


def test_the_state_may_be_a_tensor_or_a_list(tmp_path):
    for step, state in enumerate([torch.arange(3), [torch.arange(2), 1], 5, None, "text"]):
        checkpoint.save(tmp_path, state, step=step)
        assert same(checkpoint.load(tmp_path).state, state)


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
tensors = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).to(dtype).view(shape),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64, torch.float8_e8m0fnu]),
)
nests = st.recursive(
    plain | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(nest=nests)
def test_any_nest_comes_back(nest):
    flat: dict[str, Tensor] = {}
    tree = parse_json(to_json(encode(nest, flat), "tree"), "tree")
    assert same(decode(tree, flat_as_file(flat)), nest)


def flat_as_file(flat: dict[str, Tensor]):
    from laconic.checkpoint.tensors import NAMES, bits

    left = dict(flat)
    return lambda name: (lambda t: t if t.dtype in NAMES else bits(t))(left.pop(name))


def test_ordered_dicts_come_back_as_dicts(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    assert isinstance(model.state_dict(), OrderedDict)
    checkpoint.save(tmp_path, model.state_dict(), step=1)
    model.load_state_dict(checkpoint.load(tmp_path).state)


def test_an_optimizer_comes_back(tmp_path):
    model = nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, optimizer.state_dict(), step=1)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(checkpoint.load(tmp_path).state)
    assert same(other.state_dict(), optimizer.state_dict())


class Number(int):
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.float64(0.5), r"state\['a'\]\[0\] is a numpy.float64, which a checkpoint does not hold. Save dicts"),
        (np.zeros(2), "is a numpy.ndarray"),
        (Number(3), "is a tests.checkpoint.*Number"),
        (b"bytes", "is a bytes"),
        ({1, 2}, "is a set"),
        (object(), "is an object"),
        (torch.float32, "is a torch.dtype"),
        (torch.Size([1]), "is a torch.Size"),
        ({(1, 2): 3}, r"has the key \(1, 2\): keys are strings or whole numbers"),
        ({True: 3}, "has the key True"),
        (1 << 5000, "is an int"),
        (torch.eye(3).to_sparse(), "with layout torch.sparse_coo on cpu: dense tensors with data are saved"),
        (torch.empty(3, device="meta"), "on meta"),
    ],
)
def test_what_cannot_come_back_is_refused_at_once(tmp_path, value, text):
    checkpoint.save(tmp_path, 1, step=1)
    for wait in (True, False):
        with pytest.raises(TypeError, match=text):
            checkpoint.save(tmp_path, {"a": [value]}, step=2, wait=wait)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"state is a tensor of torch.qint8, which cannot be saved. Convert it"):
        checkpoint.save(tmp_path, torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), step=1)


def test_a_nest_that_holds_itself_is_refused(tmp_path):
    nest: list[object] = []
    nest.append(nest)
    with pytest.raises(TypeError, match="nested more than 64 deep, or holds itself"):
        checkpoint.save(tmp_path, nest, step=1)


def test_the_safetensors_package_reads_our_files(tmp_path):
    state = {"model": {key: torch.arange(4, dtype=dtype) for key, dtype in [("w", torch.bfloat16), ("..", torch.int8)]}}
    state["odd"] = {"bool": torch.tensor([True]), "f64": torch.tensor(0.5).double(), "none": torch.empty(0, 2)}
    checkpoint.save(tmp_path, state, step=1)
    found = safetensors.torch.load_file(tmp_path / "step-00000001" / "worker-00000.safetensors")
    assert same(
        dict(sorted(found.items())),
        {
            "model/..": state["model"][".."],
            "model/w": state["model"]["w"],
            "odd/bool": state["odd"]["bool"],
            "odd/f64": state["odd"]["f64"],
            "odd/none": state["odd"]["none"],
        },
    )


def test_we_read_files_of_the_safetensors_package(tmp_path):
    flat = {
        f"t{i}": torch.arange(i).to(dtype)
        for i, dtype in enumerate([torch.float16, torch.uint8, torch.bool, torch.int64])
    }
    path = tmp_path / "x.safetensors"
    safetensors.torch.save_file(flat, path, metadata={"by": "package"})
    with opened(path) as file:
        read = TensorFile(file, path)
        assert all(same(read.take(name), t) for name, t in flat.items())
        read.finish()


def test_our_files_are_the_packages_files_to_the_byte(tmp_path):
    """Header padding and alignment included, where names need no escape."""
    flat = {"b": torch.arange(3.0), "a": torch.arange(5, dtype=torch.int8), "c": torch.arange(2)}
    write_file(tmp_path / "ours", chunks(flat))
    assert safetensors.torch.load((tmp_path / "ours").read_bytes()).keys() == flat.keys()
    assert len((tmp_path / "ours").read_bytes()) == len(safetensors.torch.save(flat))


def test_the_safetensors_package_is_not_needed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    checkpoint.save(tmp_path, {"a": torch.zeros(3)}, step=1)
    assert same(checkpoint.load(tmp_path).state, {"a": torch.zeros(3)})


def test_loaded_tensors_have_memory_of_their_own(tmp_path):
    checkpoint.save(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(1000)}, step=1)
    state = checkpoint.load(tmp_path).state
    assert state["a"].untyped_storage().nbytes() == 12
    state["a"].add_(1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wait", [True, False])
def test_tensors_on_a_gpu_are_saved_as_they_are_now_and_come_back_to_the_cpu(tmp_path, wait):
    weights = torch.arange(1000.0, device="cuda").view(10, 100)
    state = {"w": weights, "t": weights.t(), "b": weights.bfloat16(), "scalar": weights[0, 1]}
    expected = {name: t.cpu().clone() for name, t in state.items()}
    saving = checkpoint.save(tmp_path, state, step=1, wait=wait)
    weights.zero_()
    assert saving.wait()
    assert same(checkpoint.load(tmp_path).state, expected)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path):
    write_file(tmp_path / "x", chunks({"a": torch.zeros(1000)}))
    with opened(tmp_path / "x") as file:
        read = TensorFile(file, tmp_path / "x")
        Path(tmp_path / "x").write_bytes(b"")
        with pytest.raises(CheckpointError, match="x ended 4000 bytes too early"):
            read.take("a")
