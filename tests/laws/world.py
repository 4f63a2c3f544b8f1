"""Workers in one process, and tensors of unusual kinds for them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.comm.lockstep import lockstep, serve
from laconic.exchange import Averaged, Decide, Done, Exchange, Mean, Peers, State, T, Tensors, advance
from laconic.ledger import Ledger

SHAPES: dict[str, tuple[int, ...]] = {
    "square.weight": (24, 24),
    "twin.weight": (24, 24),  # a repeated shape
    "odd.weight": (17, 29),
    "deficient.weight": (20, 30),
    "zero.weight": (16, 18),
    "one_row.weight": (19, 21),  # the gradient of an embedding of which one row was used
    "conv.weight": (16, 8, 3, 3),  # channels_last
    "turned.weight": (31, 16),  # every second row of a transposed view
    "narrow.weight": (3, 2),
    "bias": (13,),
    "gain": (),
    "nothing": (0,),
    "hollow.weight": (0, 5),
}


def tensors(
    seed: object, dtype: torch.dtype = torch.float32, names: Sequence[str] = tuple(SHAPES)
) -> dict[str, Tensor]:
    """Return one worker's tensors: random, of the kinds that their names give. `seed` may be any printable value."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr(seed).encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    made = {name: normal(*shape) for name, shape in SHAPES.items()}
    made["deficient.weight"] = normal(20, 1) @ normal(1, 30)
    made["zero.weight"] = torch.zeros(16, 18, dtype=dtype)
    made["one_row.weight"][torch.arange(19) != 7] = 0
    made["conv.weight"] = made["conv.weight"].to(memory_format=torch.channels_last)
    made["turned.weight"] = normal(16, 62).T[::2]
    return {name: made[name] for name in names}


def carried(codec: Codec) -> list[str]:
    """Return the names of the tensors that a codec accepts: all, or the matrices."""
    return [name for name, shape in SHAPES.items() if codec.accepts(torch.Size(shape))]


Runner = Callable[[Sequence[Exchange[Averaged]]], list[Averaged]]


def in_place(exchanges: Sequence[Exchange[T]]) -> list[T]:
    """Run exchanges as a process group does: write the mean over the memory of the request."""
    asked = [advance(exchange, None) for exchange in exchanges]
    while True:
        requests = [each for each in asked if not isinstance(each, Done)]
        if not requests:
            return [each.result for each in asked if isinstance(each, Done)]
        xs = [request.x for request in requests if isinstance(request, Mean)]
        mean = torch.stack(xs).mean(0, dtype=torch.float64) if xs else None
        answers = serve(requests) if mean is None else [x.copy_(mean) for x in xs]
        asked = [advance(exchange, answer) for exchange, answer in zip(exchanges, answers, strict=True)]


def at_once(exchanges: Sequence[Exchange[Averaged]]) -> Exchange[Averaged]:
    """Run several exchanges of one worker concurrently: all requests of a round before the first answer."""
    waiting = {exchange: advance(exchange, None) for exchange in exchanges}
    ends: list[Averaged] = []
    while waiting:
        flags = [request.ok for request in waiting.values() if isinstance(request, Decide)]
        decided = (yield Decide(torch.stack(flags).all())) if len(flags) == len(waiting) else None
        answers = {}
        for exchange, request in waiting.items():
            assert not isinstance(request, Done), "every exchange must make a request"
            answers[exchange] = (yield request) if decided is None else decided
        asked = {exchange: advance(exchange, answer) for exchange, answer in answers.items()}
        ends += [each.result for each in asked.values() if isinstance(each, Done)]
        waiting = {exchange: each for exchange, each in asked.items() if not isinstance(each, Done)}
    mean = {name: t for end in ends for name, t in end.mean.items()}
    return Averaged(mean, dict, lambda: torch.stack([end.finite() for end in ends]).all())


def averaged(
    codec: Codec,
    inputs: Sequence[Tensors],
    states: Sequence[State] | None = None,
    *,
    ledger: Ledger | None = None,
    reuse: bool = False,
) -> list[Averaged]:
    """Average the inputs of some workers, in lockstep."""
    states = [{} for _ in inputs] if states is None else states
    return lockstep(exchanges_of(codec, inputs, states, reuse=reuse), ledger)


def exchanges_of(
    codec: Codec, inputs: Sequence[Tensors], states: Sequence[State], *, reuse: bool = False
) -> list[Exchange[Averaged]]:
    """Return the exchange of each worker."""
    return [
        codec.average(given, state, Peers(rank, len(inputs)), reuse=reuse)
        for rank, (given, state) in enumerate(zip(inputs, states, strict=True))
    ]


@dataclass
class World:
    """`workers` copies of one codec, each with a state of its own."""

    codec: Codec
    workers: int
    reuse: bool = False
    """Whether codecs may overwrite their inputs, which fused paths need."""
    ledger: Ledger = field(default_factory=Ledger)
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.states = self.states or [{} for _ in range(self.workers)]

    def average(self, inputs: Sequence[Tensors], *, runner: Runner | None = None) -> list[Averaged]:
        """Average the inputs of all workers."""
        if self.reuse:
            inputs = [side_by_side(given) for given in inputs]  # copies: the caller's tensors do not change
        exchanges = exchanges_of(self.codec, inputs, self.states, reuse=self.reuse)
        return lockstep(exchanges, self.ledger) if runner is None else runner(exchanges)

    def inputs(self, seed: object, dtype: torch.dtype = torch.float32) -> list[dict[str, Tensor]]:
        """Return new tensors for each worker, of all kinds that the codec accepts."""
        names = carried(self.codec)
        return [tensors((seed, self.codec, worker), dtype, names) for worker in range(self.workers)]


def side_by_side(given: Tensors) -> dict[str, Tensor]:
    """Copy tensors into views of one flat buffer, as in a DDP bucket."""
    flat = torch.cat([t.reshape(-1) for t in given.values()])
    pieces = flat.split([t.numel() for t in given.values()])
    return {name: piece.view(t.shape) for (name, t), piece in zip(given.items(), pieces, strict=True)}


def true_mean(inputs: Sequence[Tensors]) -> dict[str, Tensor]:
    """Return the exact mean in float64."""
    return {name: torch.stack([given[name].double() for given in inputs]).mean(0) for name in inputs[0]}


def same_bits(a: Any, b: Any) -> bool:
    """Compare trees of dicts, tensors and numbers bit by bit."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        a, b = _without_caches(a), _without_caches(b)
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return bool(a == b)


def _without_caches(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what a codec computes once for each layout: it is never saved."""
    return {key: value for key, value in tree.items() if not key.startswith("_")}


def _bits(x: Tensor) -> Tensor:
    """Return a tensor's bytes: a NaN equals itself, and 0 differs from -0."""
    return x.detach().reshape(-1).contiguous().view(torch.uint8)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path to each leaf of a state, and the leaf."""
    if isinstance(tree, Mapping):
        for key, value in _without_caches(tree).items():
            yield from leaves(value, (*path, key))
    else:
        yield path, tree


def residuals(state: State) -> dict[str, Tensor]:
    """Return all residuals of a state by tensor name."""
    return {path[-1]: leaf for path, leaf in leaves(state) if "residual" in path}
