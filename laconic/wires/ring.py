"""Averaging where sums go round: each share once to be added up, by one worker after the other, and once to be told.

A worker talks to its neighbours only, and adds what it has just heard, while that is in the cache. Between machines a
ring says less than a star: only those at the ends of a machine's row of workers talk to another machine. But sums must
be exact enough to be passed on, and a word is passed on `2 (workers - 1)` times until all have it: it is for large
models.

All workers must take the same steps, for nothing says what it is. So these depend on shapes and dtypes alone.

What passes through a core pushes everything else out of its caches, and any call to torch then takes tens of
microseconds. So views are made before anything is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from laconic.wires.letters import Mail, in_groups, in_shares
from laconic.wires.stream import Stream, memory_of
from laconic.wires.wire import Part

SHARE = 2 << 20
"""Bytes that are said at a time: less costs calls, and more is no longer in the cache when it is added."""

CROWDED, NEAR, FAR = 1, 4, 8
"""Laps at a time, or a few more. Where cores are few, more would only fill their caches; else neighbours must not wait
for one another, and links between machines even less."""

_END = object()


@dataclass(frozen=True, eq=False)
class _Share:
    """A share of what goes round together, in slices, and the memory of these."""

    slices: Sequence[Tensor]
    columns: Sequence[Tensor]
    """The slices as `_begin_sum` takes them."""
    memory: Sequence[memoryview]


class _Sums:
    """Memory for a share that is being added up."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._whole = torch.empty(size, dtype=dtype)
        self._memory = memory_of(self._whole)
        self._cuts: dict[tuple[int, ...], _Share] = {}

    def like(self, share: _Share) -> _Share:
        """See it as a share with slices of the same sizes, which lie side by side."""
        sizes = tuple(map(len, share.memory))
        if sizes not in self._cuts:
            size = sum(sizes)
            self._cuts[sizes] = _share(self._whole[:size].split(sizes), [self._memory[:size]])
        return self._cuts[sizes]


class Ring:
    """One correspondence about parts, none of them empty, over a stream instead of letters. All are open at once."""

    def __init__(self, mail: Mail, parts: Sequence[Part], stream: Stream) -> None:
        self._mail, self._parts, self._stream = mail, parts, stream
        dtypes = {part.dtype for part in parts}
        self._free: dict[torch.dtype, list[_Sums]] = {dtype: [] for dtype in dtypes}
        self._ones = {dtype: torch.ones(1, dtype=dtype) for dtype in dtypes}

    def deliver(self) -> None:
        """Average all parts, and close them with their means."""
        flats = [part.open() for part in self._parts]
        most = SHARE * self._mail.workers
        pieces = (piece for flat in flats for piece in flat.tensor_split(-(-flat.nbytes // most)))
        waiting = [self._lap(self._shares(group)) for group in in_groups(pieces, most)]
        with self._stream.talk(self._mail.limit_s):
            self._go_round(waiting)
        self._mail.close(self._parts, flats)

    def _go_round(self, waiting: Sequence[Generator[None, None, None]]) -> None:
        """At some beats a lap sets out; at some it goes on, to where the next share has come by."""
        wanted = FAR if self._stream.far else CROWDED if self._stream.crowded else NEAR
        passes = 2 * len(self._mail.others)
        apart, rest = max(1, passes // wanted), max(1, wanted // passes)  # beats: between two laps, and of one
        setting_out, laps = iter(waiting), list[tuple[int, Generator[None, None, None]]]()
        for beat in itertools.count():
            laps = [(since, lap) for since, lap in laps if (beat - since) % rest or _goes_on(lap)]
            if beat % apart == 0:
                lap = next(setting_out, None)
                if lap is not None:
                    next(lap)
                    laps.append((beat, lap))
                elif not laps:
                    return

    def _shares(self, flats: Sequence[Tensor]) -> list[_Share]:
        """Cut flat tensors into shares, in the order in which these come by."""
        workers, me = self._mail.workers, self._mail.me
        slices, memory = in_shares(flats, workers), in_shares([memory_of(flat) for flat in flats], workers)
        return [_share(slices[(me - hop) % workers], memory[(me - hop) % workers]) for hop in range(workers)]

    def _lap(self, shares: Sequence[_Share]) -> Generator[None, None, None]:
        """Average what goes round together; before each share that comes by, let others go."""
        say, write, scale = self._stream.say, self._mail.write, 1 / self._mail.workers
        dtype, last = next(t.dtype for share in shares for t in share.slices), len(shares) - 1
        free, begin_sum = self._free[dtype], partial(_begin_sum, self._ones[dtype])
        say(shares[0].memory)
        for hop, own in enumerate(shares[1:], start=1):
            yield
            sums = free.pop() if free else _Sums(SHARE // dtype.itemsize + 1, dtype)
            said = sums.like(own)
            self._hear(said)
            add = begin_sum if hop == 1 else _add
            if hop < last:
                add(said, own, said, scale)
                say(said.memory, then=partial(free.append, sums))
            else:
                write(partial(add, said, own, own, scale))
                free.append(sums)
                say(own.memory)
        for hop, own in enumerate(shares[:-1], start=1):
            yield
            self._hear(own)
            if hop < last:
                say(own.memory)

    def _hear(self, share: _Share) -> None:
        for memory in share.memory:
            self._stream.hear(memory)
        self._mail.come += 1


def _share(slices: Sequence[Tensor], memory: Sequence[memoryview]) -> _Share:
    return _Share(slices, [t.view(-1, 1) for t in slices], memory)


def _goes_on(lap: Generator[None, None, None]) -> bool:
    """Let a lap go on, and tell whether it is still under way."""
    return next(lap, _END) is not _END


def _begin_sum(one: Tensor, said: _Share, own: _Share, into: _Share, scale: float) -> None:
    """Divide both before they are added, so that nothing overflows, in one pass over memory."""
    for first, second, place in zip(said.columns, own.slices, into.columns, strict=True):
        torch.addr(first, second, one, beta=scale, alpha=scale, out=place)


def _add(sums: _Share, own: _Share, into: _Share, scale: float) -> None:
    for sum_, weight, place in zip(sums.slices, own.slices, into.slices, strict=True):
        torch.add(sum_, weight, alpha=scale, out=place)
