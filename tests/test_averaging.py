"""Averaging in place: every path gives the mean, leaves memory where it is, and takes little more of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from laconic import averaging
from laconic.averaging import average_in_place, in_turn
from laconic.buckets import cut, overlapping
from laconic.ledger import Ledger
from laconic.wires import group
from laconic.wires.dry import dry
from laconic.wires.group import Conductor
from laconic.wires.lockstep import lockstep
from tests.workers import run_workers

LARGE, BUCKET = 4_000, 10_000
HALVES = (torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int16, torch.uint8, torch.bool)


def _small_limits() -> None:
    """Let a few kilobytes go the ways of many megabytes."""
    averaging.LARGE, averaging.BUCKET = LARGE, BUCKET
    group._BY_LETTER, group._IN_CACHE = 3_000, 100


def _conductor() -> Conductor:
    return Conductor(dist.group.WORLD, Ledger(), share=True)


def _tensors(seed: int) -> dict[str, Tensor]:
    """One of each kind: sizes that nothing divides, strides of all sorts, in pieces or packed, and nothing at all."""
    lots = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=lots)

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


def _where(tensors: Mapping[str, Tensor]) -> list[tuple[Any, ...]]:
    return [(t.data_ptr(), t.stride(), t.shape, t.dtype) for t in tensors.values()]


def _averaged(worker: int) -> tuple[dict[str, Tensor], bool, int]:
    _small_limits()
    tensors = _tensors(worker)
    before = _where(tensors)
    conductor = _conductor()
    average_in_place(conductor, tensors)
    found = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return found, _where(tensors) == before, conductor.ledger.payload_bytes


def _right(workers: int) -> dict[str, Tensor]:
    """The plain means, in float64."""
    given = [_tensors(worker) for worker in range(workers)]
    means = {}
    for name, t in given[0].items():
        wide = torch.complex128 if t.is_complex() else torch.float64
        means[name] = torch.stack([each[name].to(wide) for each in given]).mean(0)
    return means


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_path_gives_the_mean(workers: int):
    results = run_workers(_averaged, workers)
    right = _right(workers)
    for found, stayed, sent in results:
        assert stayed, "a tensor moved, or was given other strides"
        assert sent == sum(t.nbytes for t in found.values())
        for name, mean in right.items():
            dtype = found[name].dtype
            tolerance = 0.5 if dtype in WHOLE else 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(found[name].to(mean.dtype), mean, rtol=0, atol=4 * tolerance, msg=name)
            assert torch.equal(found[name], results[0][0][name]), f"{name} is not the same on every worker"
            if dtype in WHOLE:
                assert float((found[name].double() - mean).abs().max()) <= 0.5, name


def _in_between(worker: int) -> list[Tensor]:
    """Average every second column, and show the ones between."""
    _small_limits()
    bases = [torch.full((67, 62), float(worker)), torch.full((4, 6), float(worker))]
    average_in_place(_conductor(), {str(i): base[:, ::2] for i, base in enumerate(bases)})
    return bases


def test_what_lies_between_is_left_alone():
    for worker, bases in enumerate(run_workers(_in_between, 2)):
        for base in bases:
            assert (base[:, ::2] == 0.5).all()
            assert (base[:, 1::2] == worker).all()


def _equal_replicas(worker: int) -> list[str]:
    """Name what is not, bit for bit, what it was."""
    _small_limits()
    tensors = _tensors(0)
    hard = torch.tensor([float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-37, -0.0, 0.0])
    tensors |= {"hard": hard.repeat(301), "small hard": hard.clone()}
    for dtype in HALVES:
        limits = torch.finfo(dtype)
        few = torch.tensor([limits.max, limits.min, limits.tiny, float("inf")], dtype=dtype)
        tensors |= {f"hard {dtype}": few.repeat(1001), f"small hard {dtype}": few}
    before = {name: t.clone() for name, t in tensors.items()}
    average_in_place(_conductor(), tensors)
    return [name for name, t in tensors.items() if not torch.equal(_bits(t), _bits(before[name]))]


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_equal_replicas_stay_bit_equal(workers: int):
    for changed in run_workers(_equal_replicas, workers):
        assert not changed


def _out_of_reach(worker: int) -> list[float]:
    """Numbers whose distances overflow, and infinities on one worker only."""
    _small_limits()
    x = torch.tensor([[3e38, -3e38, 3e38], [float("inf"), 1.0, -1.0], [float("nan"), 0.0, 1.0]])[:, worker].repeat(700)
    average_in_place(_conductor(), {"x": x})
    return x[-3:].tolist()


def test_means_of_numbers_too_far_apart():
    for huge, infinite, unknown in run_workers(_out_of_reach, 3):
        assert huge == pytest.approx(1e38)
        assert infinite == float("inf")
        assert unknown != unknown


def _tied(worker: int) -> list[list[float]]:
    """The same memory under several names: contiguous, transposed, in part."""
    _small_limits()
    x = torch.full((40, 40), float(worker))
    average_in_place(_conductor(), {"embedding": x, "head": x, "turned": x.T, "top": x[:30]})
    return [x.unique().tolist()]


def test_tied_weights_are_averaged_once():
    assert run_workers(_tied, 2) == [[[0.5]], [[0.5]]]
    assert run_workers(_tied, 3) == [[[1.0]], [[1.0]], [[1.0]]]


def _other_strides(worker: int) -> list[Tensor]:
    _small_limits()
    rows = torch.arange(5000.0).view(50, 100)
    x = rows.clone() if worker == 0 else rows.T.contiguous().T.clone(memory_format=torch.preserve_format)
    assert x.is_contiguous() == (worker == 0)
    average_in_place(_conductor(), {"x": x})
    return [x.contiguous(), rows]


def test_workers_may_lay_out_their_memory_differently():
    for workers in (2, 3):
        for found, rows in run_workers(_other_strides, workers):
            assert torch.equal(found, rows)


def test_parameters_that_are_trained_can_be_given_as_they_are():
    assert run_workers(_parameter, 2) == [[0.5, 0.5], [0.5, 0.5]]


def _parameter(worker: int) -> list[float]:
    _small_limits()
    tensors = {name: torch.nn.Parameter(torch.full((size,), float(worker))) for name, size in (("l", 5000), ("s", 5))}
    average_in_place(_conductor(), tensors)
    return [float(t.detach().unique()) for t in tensors.values()]


def test_a_world_of_one_says_nothing():
    conductor = Conductor(None, Ledger())
    x = torch.arange(3.0)
    average_in_place(conductor, {"x": x})
    assert x.tolist() == [0, 1, 2] and conductor.ledger.collectives == 0


def _monkeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "LARGE", LARGE)
    monkeypatch.setattr(averaging, "BUCKET", BUCKET)


def test_exchanges_depend_on_shapes_alone(monkeypatch: pytest.MonkeyPatch):
    _monkeyed(monkeypatch)
    sent = []
    tied = torch.zeros(90, 90)
    for x, y in [
        (torch.zeros(90, 90), torch.zeros(90, 90)),
        (torch.zeros(90, 90).T, torch.zeros(90, 180)[:, ::2]),
        (tied, tied),
    ]:
        ledger = Ledger()
        for exchange in in_turn({"x": x, "y": y, "s": torch.zeros(3), "t": torch.zeros(9)[::3], "e": torch.zeros(0)}):
            dry(exchange, ledger, workers=2)
        sent.append([entry.payload_bytes for entry in ledger.entries])
    assert sent[0] == sent[1] == sent[2]
    assert len(sent[0]) == 2 * 4 + 1 and max(sent[0]) <= BUCKET


def test_exchanges_over_another_wire(monkeypatch: pytest.MonkeyPatch):
    """Nothing here needs a process group: workers in lockstep get the means too."""
    _monkeyed(monkeypatch)
    given = [{"x": torch.full((70, 70), float(w)), "s": torch.full((3,), float(w))} for w in range(3)]
    for together in zip(*(in_turn(tensors) for tensors in given), strict=True):
        lockstep(together)
    assert all(t.unique().tolist() == [1.0] for tensors in given for t in tensors.values())


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
    """Counts the bytes of storages that were made while it watched and are still held by anyone."""

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


def _peak(worker: int, make: Callable[[], dict[str, Tensor]]) -> int:
    """Most bytes that the conductor's thread held at once beside the tensors themselves."""
    _small_limits()
    tensors = make()
    watching = _Allocations(tensors)
    plain = Conductor._serve_one

    def watched(self: Conductor, item: Any) -> None:
        with watching:
            plain(self, item)

    Conductor._serve_one = watched  # type: ignore[method-assign]
    average_in_place(_conductor(), tensors)
    return watching.peak


def _many_large() -> dict[str, Tensor]:
    return {str(i): torch.ones(80, 80) for i in range(20)} | {"larger": torch.ones(40_000)}


def _many_large_turned() -> dict[str, Tensor]:
    return {name: t.view(80, -1).T for name, t in _many_large().items()}


def _many_small() -> dict[str, Tensor]:
    return {str(i): torch.ones(499) for i in range(200)}


def _many_half() -> dict[str, Tensor]:
    return {name: t.bfloat16() for name, t in (_many_large() | {f"s{n}": t for n, t in _many_small().items()}).items()}


SMALL_CHANGE = 2_000
"""Flags, views of nothing, and what is averaged at a time."""


@pytest.mark.parametrize(
    ("make", "workers", "buckets"),
    [
        (_many_large, 2, 0),
        pytest.param(_many_large, 3, 5, marks=pytest.mark.nightly),
        (_many_large, 4, 0),
        (_many_large_turned, 2, 5),  # two or three on their way, and those that gloo's threads have not yet let go of
        pytest.param(_many_large_turned, 3, 5, marks=pytest.mark.nightly),
        (_many_small, 2, 5),
        pytest.param(_many_small, 3, 5, marks=pytest.mark.nightly),
        (_many_half, 2, 5),
        pytest.param(_many_half, 3, 5, marks=pytest.mark.nightly),
    ],
)
def test_extra_memory_is_bounded(make: Callable[[], dict[str, Tensor]], workers: int, buckets: float):
    for peak in run_workers(_peak, workers, (make,)):
        assert peak <= buckets * BUCKET + SMALL_CHANGE


def test_five_of_our_buckets_are_two_of_ddps():
    assert 5 * averaging.BUCKET <= 2 * (25 << 20)
