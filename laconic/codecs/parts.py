"""Several codecs for the tensors of one bucket, in the same rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from laconic.codecs.contract import Codec
from laconic.exchange import (
    AllToAll,
    Averaged,
    Decide,
    Done,
    Exchange,
    Gather,
    Mean,
    Peers,
    Request,
    State,
    Tensors,
    advance,
    all_true,
    true,
)


def average_parts(
    tensors: Tensors, parts: Sequence[tuple[str, Codec, Tensors]], state: State, peers: Peers, *, reuse: bool
) -> Exchange[Averaged]:
    """Average parts of `tensors`, each through a codec of its own, whose state has the key that is given with it."""
    ends = yield from _in_shared_rounds(
        [codec.average(some, state.setdefault(key, {}), peers, reuse=reuse) for key, codec, some in parts if some],
        peers,
    )

    def own() -> dict[str, Tensor]:
        return {name: t for end in ends for name, t in end.own().items()}

    def finite() -> Tensor:
        decided = [end for end in ends if end.decided][:1]  # the answer is about all of them
        return all_true([end.finite() for end in decided or ends]) if ends else true()

    mean = {name: t for end in ends for name, t in end.mean.items()}
    return Averaged({name: mean[name] for name in tensors}, own, finite, any(end.decided for end in ends))


def _in_shared_rounds(exchanges: list[Exchange[Averaged]], peers: Peers) -> Exchange[list[Averaged]]:
    """Advance all `exchanges` together; in each round, send what can be joined as one message.

    Those that ask `Decide` wait for the others, and ask it as one.
    """
    ends: dict[int, Averaged] = {}
    held: dict[int, Tensor] = {}
    answers: dict[int, Tensor | None] = dict.fromkeys(range(len(exchanges)))
    while answers:
        requests: dict[int, Request] = {}
        for index, answer in answers.items():
            asked = advance(exchanges[index], answer)
            if isinstance(asked, Done):
                ends[index] = asked.result
            elif isinstance(asked, Decide):
                held[index] = asked.ok
            else:
                requests[index] = asked
        answers = {}
        if held and not requests:
            ok = yield Decide(all_true([*held.values(), *(end.finite() for end in ends.values())]))
            answers, held = dict.fromkeys(held, ok), {}
        for members in _joinable(requests):
            together = [requests[index] for index in members]
            received = [(yield together[0])] if len(together) == 1 else (yield from _joined(together, peers))
            answers.update(zip(members, received, strict=True))
    return [ends[index] for index in range(len(exchanges))]


def _joinable(requests: dict[int, Request]) -> list[list[int]]:
    """Group requests that can be sent as one message."""
    groups: dict[object, list[int]] = {}
    for index, request in requests.items():
        joins = isinstance(request, AllToAll | Gather) or (isinstance(request, Mean) and not request.wide)
        key = (type(request), request.x.dtype, request.x.device)
        groups.setdefault(key if joins else index, []).append(index)
    return list(groups.values())


def _joined(requests: Sequence[Request], peers: Peers) -> Exchange[list[Tensor]]:
    """Send requests of one kind, dtype and device as one, and split its result."""
    if isinstance(requests[0], AllToAll):
        return (yield from _joined_rows([request for request in requests if isinstance(request, AllToAll)], peers))
    sizes = [request.x.numel() for request in requests]
    flat = torch.cat([request.x.reshape(-1) for request in requests])
    shapes = [request.x.shape for request in requests]
    if isinstance(requests[0], Gather):
        rows = (yield Gather(flat)).split(sizes, dim=1)
        return [piece.reshape(-1, *shape) for piece, shape in zip(rows, shapes, strict=True)]
    pieces = (yield Mean(flat)).split(sizes)
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _joined_rows(requests: Sequence[AllToAll], peers: Peers) -> Exchange[list[Tensor]]:
    """Send rows of different lengths as one: for each worker, those of the first request, then of the second, ..."""
    widths = [math.prod(request.x.shape[1:]) for request in requests]
    taken = [0] * len(requests)
    parts: list[Tensor] = []
    sizes: list[int] = []
    for rows, run in groupby(zip(*(request.rows for request in requests), strict=True)):  # workers with as many rows
        count = len(list(run))
        ends = [at + count * each for at, each in zip(taken, rows, strict=True)]
        slices = [request.x[at:end] for request, at, end in zip(requests, taken, ends, strict=True)]
        lengths = [each * width for each, width in zip(rows, widths, strict=True)]
        parts.append(torch.cat([x.reshape(count, n) for x, n in zip(slices, lengths, strict=True)], dim=1).reshape(-1))
        sizes += [sum(lengths)] * count
        taken = ends
    received = yield AllToAll(torch.cat(parts), tuple(sizes))  # [workers, mine]
    shapes = [(request.rows[peers.rank], *request.x.shape[1:]) for request in requests]
    pieces = received.split([math.prod(shape) for shape in shapes], dim=1)
    return [piece.reshape(peers.size, *shape) for piece, shape in zip(pieces, shapes, strict=True)]
