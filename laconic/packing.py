"""How tensors are laid out in messages: as one flat tensor, in buckets, in rows that workers own; and in which dtype.

    flat = pack(tensors)            # one 1-D tensor
    unpack(flat, like=tensors)      # views of it, with the names and shapes of `tensors`

`pack` and `unpack` are inverses. `pack(..., alias=True)` does not copy tensors that are adjacent in memory, as the
gradients of a DDP bucket are. `in_buckets`, `bucketed`, `in_fragments` and `cut` divide a model or a tensor by size.
`Shards` divides tensors into rows, each of which one worker averages.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from laconic.exchange import State, Tensors
from laconic.torch_private.foreach import flatten, unflatten, zero_all


def pack(tensors: Tensors, *, alias: bool = False) -> Tensor:
    """Concatenate `tensors`, in their order, into one 1-D tensor.

    With `alias`, return a view if they are adjacent in memory already.

    >>> pack({"a": torch.ones(2), "b": torch.zeros(1, 2)})
    tensor([1., 1., 0., 0.])
    """
    values = list(tensors.values())
    if len({(t.dtype, t.device) for t in values}) > 1:
        kinds = sorted({f"{t.dtype} on {t.device}" for t in values})
        raise TypeError(f"pack() of {' and '.join(kinds)}: one flat tensor has one dtype and one device.")
    if alias:
        whole = side_by_side(values)
        if whole is not None:
            return whole
    if not values:
        return torch.empty(0)
    if len(values) == 1:
        return values[0].clone(memory_format=torch.contiguous_format).view(-1)
    return flatten(values)


def unpack(flat: Tensor, like: Tensors) -> dict[str, Tensor]:
    """Split `flat` into views with the names and shapes of `like`.

    >>> unpack(torch.arange(4), like={"a": torch.ones(2), "b": torch.zeros(1, 2)})
    {'a': tensor([0, 1]), 'b': tensor([[2, 3]])}
    """
    return dict(zip(like, unflatten(flat, list(like.values())), strict=True))


def side_by_side(values: Iterable[Tensor]) -> Tensor | None:
    """Return one flat view of `values` in order, or None unless they are contiguous and adjacent in memory."""
    values = [t for t in values if t.numel()]
    if not values or values[0].device.type == "meta":
        return None
    first, address = values[0], values[0].data_ptr()
    for t in values:
        if t.data_ptr() != address or not t.is_contiguous():
            return None
        address += t.nbytes
    count, start = sum(map(Tensor.numel, values)), first.storage_offset()
    if (start + count) * first.itemsize > first.untyped_storage().nbytes():  # another storage begins where one ends
        return None
    return first.as_strided((count,), (1,), start)


def on_cuda(tensors: Tensors) -> bool:
    """Return whether tensors of one device are on CUDA."""
    return any(t.is_cuda for t in tensors.values())


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix itself, or a copy if its memory does not start at a cache line, as that of a new tensor does.

    A matrix product sums along rows in another order where these start elsewhere: the last bit would depend on the
    place of a gradient in its bucket, which changes when a run is resumed.
    """
    return matrix if is_aligned(matrix) else matrix.clone()


def is_aligned(matrix: Tensor) -> bool:
    """Return whether the memory of a matrix starts at a cache line."""
    return matrix.device.type == "meta" or matrix.data_ptr() % 64 == 0


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are views of exactly the same elements."""
    alike = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
    return alike and a.data_ptr() == b.data_ptr()


def overlapping(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors that share memory with another: tied weights, views of one another.

    >>> x = torch.ones(4)
    >>> sorted(overlapping({"a": x[:2], "b": x[2:], "c": x[1:3].view(2, 1), "d": torch.ones(4)}))
    ['a', 'b', 'c']
    """
    spans: list[tuple[int, int, str]] = []
    for name, t in tensors.items():
        if t.numel():  # the addresses of its first byte and of the end of its last element
            last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
            spans.append((t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size(), name))
    found: set[str] = set()
    furthest, owner = -1, ""
    for start, end, name in sorted(spans):
        if start < furthest:
            found |= {owner, name}
        if end > furthest:
            furthest, owner = end, name
    return found


def in_buckets(tensors: Mapping[str, Tensor], cap_bytes: int = 25 << 20) -> list[list[str]]:
    """Group names into buckets of at most `cap_bytes`, each of one dtype and device, in their order.

    A tensor larger than `cap_bytes` gets a bucket of its own.

    >>> in_buckets({"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2)}, cap_bytes=16)
    [['a', 'b'], ['c']]
    """
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[str], int]] = {}
    buckets: list[list[str]] = []
    for name, t in tensors.items():
        size = t.numel() * t.element_size()
        names, filled = open_.get((t.dtype, t.device), ([], 0))
        if not names or filled + size > cap_bytes:
            names, filled = [], 0
            buckets.append(names)
        names.append(name)
        open_[t.dtype, t.device] = (names, filled + size)
    return buckets


def bucketed(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide tensors into the buckets of `in_buckets`."""
    return [{name: tensors[name] for name in names} for names in in_buckets(tensors)]


def in_fragments(tensors: Mapping[str, Tensor], fragments: int) -> list[list[str]]:
    """Distribute names over fragments of about the same size: the largest first, each to the smallest so far.

    Of fewer names than fragments, some fragments are empty.

    >>> in_fragments({"a": torch.ones(5), "b": torch.ones(3), "c": torch.ones(4), "d": torch.ones(1)}, fragments=2)
    [['a', 'd'], ['b', 'c']]
    """
    filled = [0] * fragments
    fragment_of: dict[str, int] = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
        smallest = filled.index(min(filled))
        filled[smallest] += tensors[name].numel()
        fragment_of[name] = smallest
    return [[name for name in tensors if fragment_of[name] == each] for each in range(fragments)]


def cut(t: Tensor, cap_bytes: int) -> list[Tensor]:
    """Split a tensor by rows into views of about equal size, at most `cap_bytes` each.

    The split depends on the shape alone, so workers whose strides differ split alike. The pieces of a contiguous tensor
    are contiguous.

    >>> [piece.tolist() for piece in cut(torch.arange(6).view(3, 2), cap_bytes=32)]
    [[[0, 1], [2, 3]], [[4, 5]]]
    """
    if t.nbytes <= cap_bytes or t.dim() == 0:
        return [t]
    rows = cap_bytes // t[0].nbytes
    if rows == 0:
        return [piece for row in t for piece in cut(row, cap_bytes)]
    return list(t.tensor_split(-(-len(t) // rows)))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for arithmetic and residuals: float64 for float64, else float32.

    >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a narrower dtype; finite numbers beyond its range become its largest, NaN and Inf stay.

    >>> narrowed(torch.tensor([1e9, -1e9, torch.inf]), torch.float16)
    tensor([ 65504., -65504.,      inf], dtype=torch.float16)
    """
    if dtype != torch.float16:  # all others have the range of fp32, but for the last half of a rounding
        return x if x.dtype == dtype else x.to(dtype)
    largest = torch.finfo(dtype).max
    return torch.where(x.isinf(), x, x.clamp(-largest, largest)).to(dtype)


@dataclass(frozen=True, eq=False)
class Owned:
    """The rows that one worker owns."""

    rows: Tensor
    counts: Tensor | None
    """How many numbers of each are not padding; None where there is none in any row of all workers."""
    padding: Tensor | None
    """Where padding is among the numbers of these rows; None if there is none."""


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Tensors that are views of rows, [n, row]: what is done to all of them is done in one call."""

    rows: Tensor
    tensors: dict[str, Tensor]


class Shards:
    """The rows of some tensors, and who owns which."""

    def __init__(self, tensors: Tensors, row: int, workers: int) -> None:
        device = next(iter(tensors.values())).device
        self.row, self.shapes = row, {name: t.shape for name, t in tensors.items()}
        owners, counts, keys = [], [], []
        count_of = {name: -(-shape.numel() // row) for name, shape in self.shapes.items()}
        for name, shape in self.shapes.items():
            rows, key = count_of[name], zlib.crc32(name.encode())
            index = torch.arange(rows, device=device)
            part = ((index + 1) * workers - 1) // max(1, rows)  # part p ends at row (p + 1) * rows // workers
            owners.append((part + key) % workers)  # so that small tensors are spread
            counts += [torch.full((rows - 1,), row), torch.tensor([shape.numel() - (rows - 1) * row])]
            keys.append(index + (key << 24))
        placed = [(count_of[name], shift_of(name, workers)) for name in count_of]
        self.sizes: tuple[int, ...] = tuple(sizes_of(placed, workers).tolist())
        self.starts = [0, *accumulate(self.sizes)]
        self.most = max(self.sizes)
        owner, starts = torch.cat(owners), torch.tensor(self.starts, device=device)
        self.order = owner.argsort(stable=True)
        self.inverse = self.order.argsort()
        self.places = owner * self.most + self.inverse - starts[owner]
        """Where each row is among the gathered shards, each of which is padded to `most` rows."""
        is_padded = any(shape.numel() % row for shape in self.shapes.values())
        self.counts = torch.cat(counts).to(device) if is_padded else None
        self._keys = torch.cat(keys)
        self._lengths = [length for shape in self.shapes.values() for length in (shape.numel(), -shape.numel() % row)]
        """The numbers of each tensor in its rows, and those that pad its last row."""
        self.kept: KeptRows | None = None
        """What error feedback keeps of these tensors."""
        self._owned: dict[int, Owned] = {}

    def owned(self, worker: int) -> Owned:
        """Return the rows that a worker owns."""
        if worker not in self._owned:
            rows, counts, padding = self.order[self.starts[worker] : self.starts[worker + 1]], None, None
            if self.counts is not None:
                counts = self.counts[rows]
                is_padding = torch.arange(self.row, device=rows.device) >= counts[:, None]
                padding = None if rows.device.type == "meta" else is_padding.view(-1).nonzero().view(-1)
            self._owned[worker] = Owned(rows, counts, padding)
        return self._owned[worker]

    def clear_padding(self, rows: Tensor) -> None:
        """Set the numbers of all rows that are padding to zero."""
        if self.counts is not None:
            zero_all(list(rows.view(-1).split_with_sizes(self._lengths)[1::2]))

    def keys(self, turn: int | None, worker: int) -> Tensor | None:
        """Return a number for each row that no other row, turn or worker has; None without a turn."""
        return None if turn is None else self._keys + ((turn << 12) + worker) * 0x9E3779B1

    def rows(self, tensors: Tensors) -> Tensor:
        """Copy tensors into rows [n, row], each tensor padded with zeros."""
        pieces: list[Tensor] = []
        for t in tensors.values():
            pieces.append(t.reshape(-1))
            if t.numel() % self.row:
                pieces.append(t.new_zeros(-t.numel() % self.row))
        return torch.cat(pieces).view(-1, self.row)

    def tensors(self, rows: Tensor, like: Tensors) -> dict[str, Tensor]:
        """Undo `rows`: views of it."""
        pieces = rows.view(-1).split_with_sizes(self._lengths)[::2]
        return {name: piece.view(t.shape) for (name, t), piece in zip(like.items(), pieces, strict=True)}


def shift_of(name: str, workers: int) -> int:
    """Return the worker that owns the first part of a tensor's rows, so that small tensors are spread."""
    return zlib.crc32(name.encode()) % workers


def sizes_of(placed: Iterable[tuple[int, int]], workers: int) -> Tensor:
    """Return how many rows each worker owns of tensors, each given by its rows and `shift_of` its name."""
    sizes = torch.zeros(workers, dtype=torch.int64)
    parts = torch.arange(workers + 1)
    for rows, shift in placed:
        sizes += (parts * rows // workers).diff().roll(shift)
    return sizes


def known_shards(tensors: Tensors, row: int, workers: int, state: State) -> Shards:
    """Return the shards of these tensors from a cache in the state, which is never saved."""
    known: dict[tuple[tuple[str, torch.Size], ...], Shards] = state.setdefault("_shards", {})
    key = tuple((name, t.shape) for name, t in tensors.items())  # one name has two shapes if its factors are averaged
    found = known.get(key)
    device = next(iter(tensors.values())).device
    if found is None or (found.row, len(found.sizes), found.order.device) != (row, workers, device):
        for other in [names for names in known if not set(names).isdisjoint(key)]:
            del known[other]  # an older layout of the same tensors
        found = known[key] = Shards(tensors, row, workers)
    return found
