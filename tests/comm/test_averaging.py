"""Averaging in place: the mean of every kind of tensor, in its own memory, in little extra memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from laconic.comm import Exchange, dry, lockstep
from laconic.comm.averaging import average_in_place, in_pieces
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger
from laconic.packing import cut, overlapping
from tests.workers import run_workers

LIMITS: dict[str, Any] = {"large_bytes": 4_000, "piece_bytes": 10_000}
"""So that a few kilobytes are averaged as many megabytes are."""
HALVES = (torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int16, torch.uint8, torch.bool)


def average(queue: CollectiveQueue, tensors: Mapping[str, Tensor]) -> None:
    average_in_place(queue, tensors, **LIMITS)


def _queue() -> CollectiveQueue:
    return CollectiveQueue(dist.group.WORLD, Ledger(), share=True)


def _tensors(seed: int) -> dict[str, Tensor]:
    """One of each kind: sizes that nothing divides, strides of all sorts, in pieces or packed, and empty ones."""
    generator = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {
        "pieces": some(101, 37),
        "one long row": some(1, 7919),
        "in place": some(1013),
        "small": some(7),
        "scalar": some(),
        "empty": some(3, 0),
        "double": some(1201).double(),
        "complex": torch.complex(some(601), some(601)),
        "transposed": some(61, 53).T,
        "small transposed": some(5, 3).T,
        "channels last": some(8, 5, 7, 9).contiguous(memory_format=torch.channels_last),
        "small channels last": some(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
        "every second": some(67, 62)[:, ::2],
        "small every second": some(4, 6)[:, ::2],
    }
    for dtype in HALVES:
        tensors |= {f"{dtype}": some(4001).to(dtype), f"small {dtype}": some(13).to(dtype)}
    for dtype in WHOLE:
        tensors |= {f"{dtype}": (100 * some(5003).abs()).to(dtype), f"small {dtype}": (100 * some(9).abs()).to(dtype)}
    neighbours = some(60)
    return tensors | {"left": neighbours[:17], "right": neighbours[17:]}


def _layout(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    return [(t.data_ptr(), t.stride(), t.shape, t.dtype) for t in tensors.values()]


def _all_checks(worker: int) -> dict[str, Any]:
    """Everything that one world of workers is needed for."""
    return {check.__name__: check(worker) for check in CHECKS}


def means(worker: int) -> tuple[dict[str, Tensor], bool, int]:
    tensors = _tensors(worker)
    before = _layout(tensors)
    queue = _queue()
    average(queue, tensors)
    found = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return found, _layout(tensors) == before, queue.ledger.payload_bytes


def equal_replicas(worker: int) -> list[str]:
    """Name what averaging changed of tensors that are equal on all workers."""
    tensors = _tensors(0)
    hard = torch.tensor([float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-37, -0.0, 0.0])
    tensors |= {"hard": hard.repeat(301), "small hard": hard.clone()}
    for dtype in HALVES:
        limits = torch.finfo(dtype)
        few = torch.tensor([limits.max, limits.min, limits.tiny, float("inf")], dtype=dtype)
        tensors |= {f"hard {dtype}": few.repeat(1001), f"small hard {dtype}": few}
    before = {name: t.clone() for name, t in tensors.items()}
    average(_queue(), tensors)
    return [name for name, t in tensors.items() if not torch.equal(_bits(t), _bits(before[name]))]


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


def tied(worker: int) -> list[float]:
    """The same memory under several names: contiguous, transposed, in part."""
    x = torch.full((40, 40), float(worker))
    average(_queue(), {"embedding": x, "head": x, "turned": x.T, "top": x[:30]})
    values: list[float] = x.unique().tolist()
    return values


def in_between(worker: int) -> list[Tensor]:
    """Average every second column, and return all columns."""
    bases = [torch.full((67, 62), float(worker)), torch.full((4, 6), float(worker))]
    average(_queue(), {str(i): base[:, ::2] for i, base in enumerate(bases)})
    return bases


def other_strides(worker: int) -> tuple[Tensor, Tensor]:
    """Worker 0 holds a matrix by rows, the others hold it by columns."""
    plain = torch.arange(5000.0).view(50, 100)
    x = plain.clone() if worker == 0 else plain.T.contiguous().T.clone(memory_format=torch.preserve_format)
    assert x.is_contiguous() == (worker == 0)
    average(_queue(), {"x": x})
    return x.contiguous(), plain


def parameters(worker: int) -> list[float]:
    tensors = {name: torch.nn.Parameter(torch.full((size,), float(worker))) for name, size in (("l", 5000), ("s", 5))}
    average(_queue(), tensors)
    return [float(t.detach().unique()) for t in tensors.values()]


CHECKS = (means, equal_replicas, tied, in_between, other_strides, parameters)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_tensors_of_every_kind_are_averaged_where_they_are(workers):
    results = run_workers(_all_checks, workers)
    given = [_tensors(worker) for worker in range(workers)]
    middle = (workers - 1) / 2
    for worker, result in enumerate(results):
        found, same_layout, sent = result["means"]
        assert same_layout, "a tensor moved, or has other strides"
        assert sent == sum(t.nbytes for t in found.values())
        for name, t in found.items():
            wide = torch.complex128 if t.is_complex() else torch.float64
            mean = torch.stack([each[name].to(wide) for each in given]).mean(0)
            tolerance = 0.5 if t.dtype in WHOLE else 8 * torch.finfo(t.dtype).eps
            torch.testing.assert_close(t.to(wide), mean, rtol=0, atol=tolerance, msg=name)
            assert torch.equal(t, results[0]["means"][0][name]), f"{name} is not the same on every worker"
        assert not result["equal_replicas"]
        assert result["tied"] == [middle]
        for base in result["in_between"]:
            assert (base[:, ::2] == middle).all() and (base[:, 1::2] == worker).all()
        assert torch.equal(*result["other_strides"])
        assert result["parameters"] == [middle, middle]


def _too_far_apart(worker: int) -> list[float]:
    """Numbers whose differences overflow, and infinities on one worker only."""
    x = torch.tensor([[3e38, -3e38, 3e38], [float("inf"), 1.0, -1.0], [float("nan"), 0.0, 1.0]])[:, worker].repeat(700)
    average(_queue(), {"x": x})
    return x[-3:].tolist()


def test_means_of_numbers_too_far_apart():
    for huge, infinite, unknown in run_workers(_too_far_apart, 3):
        assert huge == pytest.approx(1e38)
        assert infinite == float("inf")
        assert unknown != unknown


def test_a_world_of_one_sends_nothing():
    queue = CollectiveQueue(None, Ledger())
    x = torch.arange(3.0)
    average(queue, {"x": x})
    assert x.tolist() == [0, 1, 2] and queue.ledger.collectives == 0


def test_pieces_depend_on_shapes_alone():
    here, there = _tensors(0), {name: t.clone(memory_format=torch.contiguous_format) for name, t in _tensors(1).items()}
    sizes = []
    for tensors in (here, there):
        ledger = Ledger()
        for exchange in in_pieces(tensors, 2, **LIMITS):
            dry(exchange, ledger, workers=2)
        sizes.append([entry.payload_bytes for entry in ledger.entries])
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) <= LIMITS["piece_bytes"]


def test_pieces_run_in_lockstep_too():
    workers = [{n: t for n, t in _tensors(seed).items() if not t.is_complex()} for seed in range(3)]
    for exchanges in zip(*(in_pieces(tensors, 3, **LIMITS) for tensors in workers), strict=True):
        lockstep(exchanges)
    for name, t in workers[0].items():
        assert torch.equal(t, workers[2][name]), name


@pytest.mark.parametrize("shape", [(7,), (5, 3), (1, 4, 9), (3, 1, 1, 5), (2, 0, 3), ()])
@pytest.mark.parametrize("cap_bytes", [4, 12, 20, 1000])
def test_pieces_are_the_tensor_in_order(shape: tuple[int, ...], cap_bytes: int):
    t = torch.arange(float(torch.Size(shape).numel())).view(shape)
    pieces = cut(t, cap_bytes)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), t.reshape(-1))
    assert all(piece.nbytes <= cap_bytes and piece.is_contiguous() for piece in pieces)
    turned = torch.empty(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    assert [piece.shape for piece in cut(turned, cap_bytes)] == [piece.shape for piece in pieces]


def test_what_overlaps():
    x = torch.zeros(4, 4)
    assert overlapping({}) == set()
    assert overlapping({"a": x[:2], "b": x[2:], "c": torch.zeros(2), "d": torch.zeros(0)}) == set()
    assert overlapping({"a": x, "b": x}) == {"a", "b"}
    assert overlapping({"a": x[:1], "b": x, "c": x[3], "d": torch.zeros(2)}) == {"a", "b", "c"}


class _Allocations(TorchDispatchMode):
    """Counts the bytes of storages that were made while it is active and are still referenced."""

    def __init__(self, known: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._known = {t.untyped_storage()._cdata for t in known.values()}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self._known:
                storage = t.untyped_storage()
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._held.values()))
        return out


def _call(function: Callable[[], object]) -> Exchange[None]:
    """Call a function in the queue's thread."""
    function()
    yield from ()  # an exchange is a generator


def _peaks(worker: int) -> dict[str, int]:
    """Most bytes that the queue's thread held at once beside the tensors themselves."""
    peaks = {}
    for make in (_large, _large_turned, _small, _half):
        tensors = make()
        queue, allocations = _queue(), _Allocations(tensors)
        queue.run(_call(allocations.__enter__), "test")
        average_in_place(queue, tensors)
        queue.run(_call(lambda each=allocations: each.__exit__(None, None, None)), "test")  # type: ignore[misc]
        peaks[make.__name__] = allocations.peak
    return peaks


def _large() -> dict[str, Tensor]:
    return {str(i): torch.ones(600, 601) for i in range(20)} | {"larger": torch.ones(10_000_001)}


def _large_turned() -> dict[str, Tensor]:
    return {str(i): torch.ones(700, 600).T for i in range(30)}


def _small() -> dict[str, Tensor]:
    return {str(i): torch.ones(100_001) for i in range(150)}


def _half() -> dict[str, Tensor]:
    return {name: t.bfloat16() for name, t in (_large() | {f"s{n}": t for n, t in _small().items()}).items()}


@pytest.mark.parametrize(
    "workers", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_extra_memory_is_at_most_two_of_ddps_buckets(workers):
    for peaks in run_workers(_peaks, workers):
        assert max(peaks.values()) <= 2 * (25 << 20), peaks
        if workers != 3:
            assert peaks["_large"] <= 2_000, "large tensors are averaged in their own memory"
