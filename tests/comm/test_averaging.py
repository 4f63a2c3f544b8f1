"""Averaging in place: every path gives the mean, leaves memory where it is, and takes little more of it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from laconic.comm.correspondence import Correspondents
from laconic.comm.letters import in_groups, in_shares
from laconic.comm.ring import Ring
from laconic.comm.star import Star
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from laconic import averaging
from laconic.codecs.packing import cut, overlapping
from laconic.comm import correspondence, group, letters, means, ring, stream
from laconic.comm.averaging import average_in_place, in_turn, means_of, pieces_of
from laconic.comm.dry import dry
from laconic.comm.lockstep import lockstep
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger
from tests.workers import run_workers

LARGE, BUCKET, GROUP, BUCKETS = 4_000, 10_000, 12_000, 50_000
SHARE = 3_000
HALVES = (torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int16, torch.uint8, torch.bool)


def _small_limits(way: str = "star") -> None:
    """Let a few kilobytes go the ways of many megabytes: worker to worker, or in collectives."""
    if way == "collectives":
        CollectiveQueue.writes_letters = property(lambda self: False)  # type: ignore[assignment, method-assign]
    averaging.LARGE, averaging.BUCKET = LARGE, BUCKET
    group._BY_LETTER, means.IN_CACHE = 3_000, 100
    letters.GROUP, letters.BUCKETS = GROUP, BUCKETS
    ring.SHARE = SHARE
    correspondence.ROUND = 0 if way == "ring" else 1 << 60


def _goes(way: str) -> Callable[[], bool]:
    """Watch which way letters go: also where there are collectives, what is added carefully goes by letter."""
    gone: list[str] = []

    def watch(where: type[Ring] | type[Star], name: str) -> None:
        deliver = where.deliver

        def watched(self: Any) -> None:
            gone.append(name)
            deliver(self)

        where.deliver = watched  # type: ignore[method-assign]

    watch(Ring, "ring")
    watch(Star, "star")
    return lambda: set(gone) == {way} or (way == "collectives" and "ring" not in gone)


def _conductor() -> CollectiveQueue:
    return CollectiveQueue(dist.group.WORLD, Ledger(), share=True)


def _tensors(seed: int, way: str = "star") -> dict[str, Tensor]:
    """One of each kind: sizes that nothing divides, strides of all sorts, in pieces or packed, and nothing at all."""
    tensors = _of_all_kinds(seed)
    if way != "ring":
        return tensors
    # Of what need not be copied as much as there is, of what must be a little, and only what is added exactly.
    for name in ("transposed", "channels last", "every second"):
        del tensors[name]
    return {name: t for name, t in tensors.items() if t.dtype in (torch.float32, torch.float64)}


def _of_all_kinds(seed: int) -> dict[str, Tensor]:
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


def _averaged(worker: int, way: str) -> tuple[dict[str, Tensor], bool, int]:
    _small_limits(way)
    goes = _goes(way)
    tensors = _tensors(worker, way)
    before = _where(tensors)
    queue = _conductor()
    average_in_place(queue, tensors)
    assert goes()
    found = {name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    return found, _where(tensors) == before, queue.ledger.payload_bytes


def _right(workers: int, way: str) -> dict[str, Tensor]:
    """The plain means, in float64."""
    given = [_tensors(worker, way) for worker in range(workers)]
    means = {}
    for name, t in given[0].items():
        wide = torch.complex128 if t.is_complex() else torch.float64
        means[name] = torch.stack([each[name].to(wide) for each in given]).mean(0)
    return means


by_both = pytest.mark.parametrize("way", ["star", "collectives"])


@pytest.mark.parametrize(
    ("way", "workers"),
    [*((way, workers) for way in ("star", "collectives") for workers in (2, 3, 4)), ("ring", 2), ("ring", 4)],
)
def test_every_path_gives_the_mean(workers: int, way: str):
    results = run_workers(_averaged, workers, (way,))
    right = _right(workers, way)
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


def _in_order(worker: int, way: str) -> tuple[Tensor, Tensor]:
    """Average by letter, and beside it the sum of shares: in the order of the workers, or in the ring's."""
    _small_limits(way)
    given = [1e3 * torch.randn(7001, generator=torch.Generator().manual_seed(w)) for w in range(4)]
    mine = given[worker].clone()
    average_in_place(_conductor(), {"x": mine})
    right = torch.empty_like(mine)
    for piece in cut(torch.arange(len(mine), dtype=torch.int32), GROUP):
        for owner, share in enumerate(in_shares([piece], 4)):
            for at in share:
                start = owner if way == "ring" else 0
                right[at] = given[start][at] / 4
                for far in range(1, 4):
                    right[at] += given[(start + far) % 4][at] / 4
    return mine, right


@pytest.mark.parametrize("way", ["star", "ring"])
def test_letters_are_added_in_one_order(way: str):
    for found, right in run_workers(_in_order, 4, (way,)):
        assert torch.equal(found, right)


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


def _equal_replicas(worker: int, way: str) -> list[str]:
    """Name what is not, bit for bit, what it was."""
    _small_limits(way)
    goes = _goes(way)
    tensors = _tensors(0, way)
    hard = torch.tensor([float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-37, -0.0, 0.0])
    tensors |= {"hard": hard.repeat(301), "small hard": hard.clone()}
    for dtype in HALVES if way != "ring" else ():
        limits = torch.finfo(dtype)
        few = torch.tensor([limits.max, limits.min, limits.tiny, float("inf")], dtype=dtype)
        tensors |= {f"hard {dtype}": few.repeat(1001), f"small hard {dtype}": few}
    before = {name: t.clone() for name, t in tensors.items()}
    average_in_place(_conductor(), tensors)
    assert goes()
    return [name for name, t in tensors.items() if not torch.equal(_bits(t), _bits(before[name]))]


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("way", "workers"),
    [*((way, workers) for way in ("star", "collectives") for workers in (2, 3, 4, 5)), ("ring", 2), ("ring", 4)],
)
def test_equal_replicas_stay_bit_equal(workers: int, way: str):
    for changed in run_workers(_equal_replicas, workers, (way,)):
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


def _tied(worker: int, way: str) -> list[list[float]]:
    """The same memory under several names: contiguous, transposed, in part."""
    _small_limits(way)
    x = torch.full((40, 40), float(worker))
    average_in_place(_conductor(), {"embedding": x, "head": x, "turned": x.T, "top": x[:30]})
    return [x.unique().tolist()]


def _fewer_than_workers(worker: int, way: str) -> list[list[float]]:
    """A number alone, for it is of another kind than the rest."""
    _small_limits(way)
    goes = _goes(way)
    tensors = {"one": torch.full((), float(worker)).double(), "many": torch.full((2000,), float(worker))}
    average_in_place(_conductor(), tensors)
    assert goes()
    return [t.unique().tolist() for t in tensors.values()]


@pytest.mark.parametrize("way", ["star", "ring"])
def test_some_workers_may_have_nothing_to_say(way: str):
    assert run_workers(_fewer_than_workers, 4, (way,)) == [[[1.5], [1.5]]] * 4


@by_both
def test_tied_weights_are_averaged_once(way: str):
    assert run_workers(_tied, 2, (way,)) == [[[0.5]], [[0.5]]]
    assert run_workers(_tied, 3, (way,)) == [[[1.0]], [[1.0]], [[1.0]]]


def _other_strides(worker: int, way: str, rows: int) -> list[Tensor]:
    """Turned on all workers but one, who then copy what does not go round as it is; unless it is too much."""
    _small_limits(way)
    goes = _goes("ring" if way == "ring" and 400 * rows <= GROUP else "star" if way == "ring" else way)
    plain = torch.arange(100.0 * rows).view(rows, 100)
    x = plain.clone() if worker == 0 else plain.T.contiguous().T.clone(memory_format=torch.preserve_format)
    assert x.is_contiguous() == (worker == 0)
    others = {str(i): torch.full((1500 + i,), float(worker)) for i in range(20)}  # which make the ring full
    average_in_place(_conductor(), {"x": x, **others})
    assert goes()
    return [x.contiguous(), plain, torch.stack([t.mean() for t in others.values()])]


@pytest.mark.parametrize(
    ("way", "workers"), [("star", 2), ("star", 3), ("collectives", 2), ("collectives", 3), ("ring", 2), ("ring", 4)]
)
@pytest.mark.parametrize("rows", [50, 20])
def test_workers_may_lay_out_their_memory_differently(way: str, workers: int, rows: int):
    for found, plain, others in run_workers(_other_strides, workers, (way, rows)):
        assert torch.equal(found, plain)
        assert (others == (workers - 1) / 2).all()


def test_parameters_that_are_trained_can_be_given_as_they_are():
    assert run_workers(_parameter, 2) == [[0.5, 0.5], [0.5, 0.5]]


def _parameter(worker: int) -> list[float]:
    _small_limits()
    tensors = {name: torch.nn.Parameter(torch.full((size,), float(worker))) for name, size in (("l", 5000), ("s", 5))}
    average_in_place(_conductor(), tensors)
    return [float(t.detach().unique()) for t in tensors.values()]


def test_a_world_of_one_says_nothing():
    queue = CollectiveQueue(None, Ledger())
    x = torch.arange(3.0)
    average_in_place(queue, {"x": x})
    assert x.tolist() == [0, 1, 2] and queue.ledger.collectives == 0


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


def test_all_at_once_over_other_wires(monkeypatch: pytest.MonkeyPatch):
    _monkeyed(monkeypatch)
    given = [{"x": torch.full((70, 70), float(w)).T, "s": torch.full((3,), float(w))} for w in range(3)]
    ledgers = Ledger(), Ledger()
    dry(means_of(list(pieces_of(given[0], GROUP))), ledgers[0], workers=3)
    lockstep([means_of(list(pieces_of(tensors, GROUP))) for tensors in given], ledgers[1])
    assert all(t.unique().tolist() == [1.0] for tensors in given for t in tensors.values())
    assert ledgers[0].wire_bytes == ledgers[1].wire_bytes == 2 * 2 * 4 * (70 * 70 + 3) // 3


@pytest.mark.parametrize("workers", [2, 3, 5, 64])
@pytest.mark.parametrize("sizes", [[10], [1, 1, 1], [7, 1, 130, 2], [63, 64, 65]])
def test_shares_are_the_whole_in_order(workers: int, sizes: list[int]):
    flats = list(torch.arange(sum(sizes)).split(sizes))
    shares = in_shares(flats, workers)
    assert torch.equal(torch.cat([piece for share in shares for piece in share]), torch.arange(sum(sizes)))
    counts = [sum(piece.numel() for piece in share) for share in shares]
    assert len(counts) == workers and max(counts) - min(counts) <= 1
    places = [(flat.data_ptr(), flat.data_ptr() + flat.nbytes) for flat in flats]
    assert all(any(a <= p.data_ptr() < b for a, b in places) for share in shares for p in share), "a copy"


def test_groups_have_one_dtype_and_a_limit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(averaging, "LARGE", 100)
    tensors = {str(i): torch.zeros(size) for i, size in enumerate([30, 40, 50, 200])}
    tensors |= {"half": torch.zeros(60, dtype=torch.bfloat16), "few": torch.zeros(3), "none": torch.zeros(0)}
    pieces = list(pieces_of(tensors, cap_bytes=400))
    groups = list(in_groups(pieces, cap_bytes=400))
    assert [piece for each in groups for piece in each] == [piece for piece in pieces if piece.nbytes]
    assert [sum(piece.nbytes for piece in each) for each in groups] == [280, 200, 400, 400, 120, 12]
    assert all(len({piece.dtype for piece in each}) == 1 for each in groups)


def _given_up(worker: int, way: str) -> tuple[list[float], str]:
    """One worker gives up before the other has said a word, and hears it then."""
    _small_limits(way)
    ours = Correspondents(dist.group.WORLD)  # type: ignore[arg-type]
    x, said = torch.full((500,), float(worker)), ""  # few enough to be copied
    (piece,) = pieces_of({"x": x}, GROUP)
    if worker == 1:
        dist.barrier()
    on_its_way = ours.average([piece], limit_s=20)
    if worker == 0:
        ours.give_up()
        dist.barrier()
        try:
            on_its_way.wait()
        except RuntimeError as error:
            said = str(error)
        dist.barrier()
        return x.unique().tolist(), said
    dist.barrier()
    return [], ""


@pytest.mark.parametrize("way", ["star", "ring"])
def test_what_was_given_up_is_not_changed_any_more(way: str):
    (values, said), _ = run_workers(_given_up, 2, (way,))
    assert values == [0.0]
    assert said == "the letters were given up"


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


def _peak(worker: int, make: Callable[[], dict[str, Tensor]], way: str) -> int:
    """Most bytes that the thread that averages held at once beside the tensors themselves."""
    _small_limits(way)
    goes = _goes(way)
    tensors = make()
    watching = _Allocations(tensors)
    where, what = {"star": (Star, "deliver"), "ring": (Ring, "deliver")}.get(way, (CollectiveQueue, "_serve_one"))
    plain = getattr(where, what)

    def watched(*args: Any) -> None:
        with watching:
            plain(*args)

    setattr(where, what, watched)
    average_in_place(_conductor(), tensors)
    assert goes()
    return watching.peak


def _many_large() -> dict[str, Tensor]:
    return {str(i): torch.ones(80, 80) for i in range(20)} | {"larger": torch.ones(40_000)}


def _many_large_turned() -> dict[str, Tensor]:
    return {name: t.view(80, -1).T for name, t in _many_large().items()}


def _many_large_and_some_small() -> dict[str, Tensor]:
    return _many_large() | {f"small {i}": torch.ones(499) for i in range(5)}


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
def test_extra_memory_of_collectives_is_bounded(make: Callable[[], dict[str, Tensor]], workers: int, buckets: float):
    for peak in run_workers(_peak, workers, (make, "collectives")):
        assert peak <= buckets * BUCKET + SMALL_CHANGE


@pytest.mark.parametrize(
    ("make", "workers", "way", "copies"),
    [
        (_many_large, 2, "star", 0),
        (_many_large, 4, "star", 0),
        (_many_large_turned, 2, "star", 2),
        pytest.param(_many_large_turned, 5, "star", 2, marks=pytest.mark.nightly),
        (_many_small, 2, "star", 2),
        (_many_half, 3, "star", 2),
    ],
)
def test_extra_memory_of_letters_is_bounded(make: Callable[[], dict[str, Tensor]], workers: int, way: str, copies: int):
    """Two buckets at most, and less by the groups that need not be copied."""
    for peak in run_workers(_peak, workers, (make, way)):
        assert peak <= BUCKETS - (2 - copies) * GROUP + SMALL_CHANGE


def _peak_in_a_ring(worker: int, make: Callable[[], dict[str, Tensor]], where: str) -> int:
    """Wherever workers are, one of them is slow to hear, so that much waits to be said to it."""
    hear = stream.Stream.hear

    def meet(mail: letters.Mail) -> stream.Stream | None:
        found = stream.meet(mail)
        assert found is not None
        found.far, found.crowded = where == "far", where == "crowded"
        found._after.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return found

    def slowly(self: stream.Stream, memory: memoryview) -> None:
        time.sleep(0.002 if worker == 1 else 0.0)
        hear(self, memory)

    vars(correspondence)["meet"] = meet
    stream.Stream.hear = slowly  # type: ignore[method-assign]
    return _peak(worker, make, "ring")


@pytest.mark.parametrize("where", ["crowded", "near", "far"])
@pytest.mark.parametrize(
    ("make", "workers", "copies"), [(_many_large, 2, 0), (_many_large, 4, 0), (_many_large_and_some_small, 4, 1)]
)
def test_extra_memory_of_a_ring_is_bounded(
    make: Callable[[], dict[str, Tensor]], workers: int, copies: int, where: str
):
    """Of each lap the sums that are to be said, and one that comes."""
    laps = 1 if where == "crowded" else 2 * (workers - 1)
    most = (laps * (workers - 2) + 1) * (SHARE + 8) + copies * GROUP
    for peak in run_workers(_peak_in_a_ring, workers, (make, where)):
        assert peak <= most + SMALL_CHANGE


def _threads(worker: int, way: str) -> tuple[set[int], int]:
    """How many threads torch uses where weights are averaged, and everywhere else after it."""
    _small_limits(way)
    torch.set_num_threads(2)
    where, seen = {"star": Star, "ring": Ring}[way], set()
    deliver = where.deliver  # type: ignore[attr-defined]

    def watched(self: Any) -> None:
        deliver(self)
        seen.add(torch.get_num_threads())

    where.deliver = watched  # type: ignore[attr-defined]
    for _ in range(2):
        average_in_place(_conductor(), _many_large())
    return seen, torch.get_num_threads()


@pytest.mark.parametrize("way", ["star", "ring"])
def test_averaging_starts_no_threads_of_torchs(way: str):
    assert run_workers(_threads, 2, (way,)) == [({1}, 2)] * 2


def test_these_are_two_of_ddps_buckets():
    assert 5 * averaging.BUCKET <= 2 * (25 << 20)
    assert letters.BUCKETS == 2 * (25 << 20) and 4 * letters.GROUP <= letters.BUCKETS
    assert abs(BUCKETS / GROUP - letters.BUCKETS / letters.GROUP) < 0.01
    assert (2 * ring.FAR + 1) * ring.SHARE + letters.GROUP <= letters.BUCKETS  # with 4 workers, at most
