"""Many tensors as one flat tensor, and names in buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from laconic.packing import in_buckets, pack, same_memory, side_by_side, unpack

shapes = st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), max_size=6)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])


def named(shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32, start: int = 0) -> dict[str, Tensor]:
    """Return tensors of consecutive numbers, so that no two elements are equal."""
    made = {}
    for index, shape in enumerate(shapes):
        size = torch.Size(shape).numel()
        made[f"t{index}"] = torch.arange(start, start + size).to(dtype).view(shape)
        start += size
    return made


@given(shapes, dtypes, st.booleans())
@settings(deadline=None, max_examples=100)
def test_unpack_is_the_inverse_of_pack(shapes: list[tuple[int, ...]], dtype: torch.dtype, alias: bool) -> None:
    tensors = named(shapes, dtype)
    flat = pack(tensors, alias=alias)
    assert flat.dim() == 1
    assert flat.numel() == sum(t.numel() for t in tensors.values())
    back = unpack(flat, like=tensors)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], t) and back[name].shape == t.shape for name, t in tensors.items())


@given(shapes)
@settings(deadline=None, max_examples=100)
def test_pack_is_the_inverse_of_unpack_without_a_copy(shapes: list[tuple[int, ...]]) -> None:
    like = named(shapes)
    flat = torch.arange(float(sum(t.numel() for t in like.values())))
    again = pack(unpack(flat, like), alias=True)
    assert torch.equal(again, flat)
    assert not flat.numel() or same_memory(again, flat)


def test_pack_copies_unless_alias_is_set() -> None:
    flat = torch.arange(6.0)
    tensors = {"a": flat[:2], "b": flat[2:].view(2, 2)}
    for copied in (pack(tensors), pack({"a": flat})):
        copied.zero_()
    assert torch.equal(flat, torch.arange(6.0))
    pack(tensors, alias=True).zero_()
    assert not flat.any()


def test_unpack_gives_views() -> None:
    flat = torch.zeros(4)
    unpack(flat, like={"a": torch.ones(2), "b": torch.ones(1, 2)})["b"].fill_(7)
    assert flat.tolist() == [0, 0, 7, 7]


whole = torch.arange(24.0)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [torch.empty(0)],
        [whole[:2], whole[3:5]],  # a gap
        [whole[2:4], whole[:2]],  # the wrong order
        [whole[:2], whole[:2]],  # the same twice
        [whole[:4].view(2, 2).T],  # not in the order of memory
        [whole[::2]],
        [whole[:2], torch.arange(24.0, 48.0)[2:4]],  # another storage, at the offset that would fit
        [whole.view(1, 2, 3, 4).to(memory_format=torch.channels_last)],
        [torch.empty(2, device="meta")],
    ],
)
def test_tensors_that_are_not_adjacent_in_memory(values: list[Tensor]) -> None:
    assert side_by_side(values) is None
    named_values = {str(index): t for index, t in enumerate(values)}
    packed = pack(named_values, alias=True)
    assert packed.shape == (sum(t.numel() for t in values),)
    if packed.device.type != "meta":
        assert packed.tolist() == [x for t in values for x in t.reshape(-1).tolist()]


def test_adjacent_tensors_may_start_at_any_offset_and_include_empty_ones() -> None:
    view = side_by_side([whole[5:7], torch.empty(0), whole[7:11].view(2, 2), whole[11]])
    assert view is not None
    assert view.tolist() == whole[5:12].tolist()
    assert view.data_ptr() == whole[5:].data_ptr()


@pytest.mark.parametrize("alias", [False, True])
def test_one_flat_tensor_has_one_dtype(alias: bool) -> None:
    with pytest.raises(TypeError) as error:
        pack({"a": torch.ones(1), "b": torch.ones(1).double()}, alias=alias)
    assert str(error.value) == (
        "pack() of torch.float32 on cpu and torch.float64 on cpu: one flat tensor has one dtype and one device."
    )


def test_same_memory() -> None:
    x = torch.arange(6.0)
    assert same_memory(x, x[:])
    assert not same_memory(x, x.clone())
    assert not same_memory(x[:4], x[2:])
    assert not same_memory(x.view(2, 3), x.view(3, 2))
    assert not same_memory(x, x.view(torch.int32))


def test_same_memory_needs_the_same_shape() -> None:
    x = torch.arange(6.0)
    assert not same_memory(x, x[:3])


@given(
    st.lists(st.tuples(st.integers(0, 12), dtypes), max_size=12),
    st.integers(1, 60),
)
@settings(deadline=None, max_examples=200)
def test_buckets_hold_every_name_once_in_order(kinds: list[tuple[int, torch.dtype]], cap_bytes: int) -> None:
    tensors = {f"t{index}": torch.zeros(size, dtype=dtype) for index, (size, dtype) in enumerate(kinds)}
    buckets = in_buckets(tensors, cap_bytes)
    assert sorted(name for names in buckets for name in names) == sorted(tensors)
    for names in buckets:
        assert names
        assert len({tensors[name].dtype for name in names}) == 1
        size = sum(tensors[name].nbytes for name in names)
        assert size <= cap_bytes or sum(1 for name in names if tensors[name].nbytes) == 1
    for dtype in {dtype for _, dtype in kinds}:
        of_dtype = [name for names in buckets for name in names if tensors[name].dtype == dtype]
        assert of_dtype == [name for name in tensors if tensors[name].dtype == dtype]


def test_buckets_are_filled() -> None:
    tensors = {str(index): torch.ones(4) for index in range(10)}
    assert [len(names) for names in in_buckets(tensors, cap_bytes=48)] == [3, 3, 3, 1]
    assert len(in_buckets(tensors)) == 1
    assert in_buckets({}) == []
