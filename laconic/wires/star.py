"""Averaging where every worker hears what all others say of its share, and answers with the mean.

What a worker says of another's share may be overwritten by what that one answers: it answers when it has heard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from laconic.wires import letters
from laconic.wires.letters import Mail, in_groups, in_shares
from laconic.wires.means import average
from laconic.wires.wire import Part

COPIES = 1
"""How many groups of parts of which one cannot travel from its own memory may be under way, while the next sets out."""

TO_OWNER, TO_ALL = letters.SAYS + 1, letters.SAYS + 2


@dataclass(frozen=True, eq=False)
class _OnItsWay:
    """Parts that were posted together."""

    parts: Sequence[Part]
    flats: list[Tensor]
    copied: bool
    room: list[Tensor]
    rows: list[list[Tensor]]
    """For each slice of this worker's share, what each worker says of it, in their order; at its own place, itself."""
    heard: list[Any]
    sent: list[Any]
    answers: list[Any]


class _Room:
    """Memory for shares, taken and given back. One dtype at a time: that of the groups that set out now."""

    def __init__(self, groups: Iterable[Sequence[Part]], workers: int) -> None:
        widest = 16  # bytes of an element: a share may have one more than another
        self.share = max(sum(part.nbytes for part in group) for group in groups) // workers + widest
        self._dtype = torch.uint8
        self._free: list[Tensor] = []

    def take(self, like: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return memory for a share, and slices of it like those."""
        if like and like[0].dtype != self._dtype:
            self._dtype, self._free = like[0].dtype, []
        memory = self._free.pop() if self._free else torch.empty(self.share // self._dtype.itemsize, dtype=self._dtype)
        slices, at = [], 0
        for t in like:
            slices.append(memory.narrow(0, at, t.numel()))
            at += t.numel()
        return memory, slices

    def give_back(self, memory: Tensor) -> None:
        """Let others have it."""
        if memory.dtype == self._dtype:
            self._free.append(memory)


class Star:
    """One correspondence about parts."""

    def __init__(self, mail: Mail, parts: Sequence[Part]) -> None:
        self._mail, self._groups = mail, list(in_groups(parts, letters.GROUP))
        self._me, self._workers, self._others = mail.me, mail.workers, mail.others
        self._posted: deque[_OnItsWay] = deque()
        self._averaged: deque[_OnItsWay] = deque()
        self._room = _Room(self._groups, mail.workers)
        self._copies = 0

    def deliver(self) -> None:
        """Average all parts, and close them with their means."""
        room = letters.BUCKETS - (COPIES + 1) * letters.GROUP
        ahead = max(2, room // (self._room.share * len(self._others)))
        for group in self._groups:
            if len(self._posted) == ahead:
                self._answer_oldest()
            self._post(group)
            while self._copies > COPIES:
                self._close_oldest()
        while self._posted:
            self._answer_oldest()
        while self._averaged:
            self._close_oldest()

    def _post(self, parts: Sequence[Part]) -> None:
        """Say what this worker holds of the others' shares, and get ready to hear what they say of its own."""
        flats = [part.open() for part in parts]
        shares = in_shares(flats, self._workers)
        rows = [[mine] * self._workers for mine in shares[self._me]]
        room, heard, sent, answers = [], [], [], []
        for worker in self._others:
            memory, said = self._room.take(like=shares[self._me])
            room.append(memory)
            for row, slice_ in zip(rows, said, strict=True):
                row[worker] = slice_
            heard += self._mail.receive(said, worker, TO_OWNER)
            sent += self._mail.send(shares[worker], worker, TO_OWNER)
            answers += self._mail.receive(shares[worker], worker, TO_ALL)
        copied = any(part.copied for part in parts)
        self._copies += copied
        self._posted.append(_OnItsWay(parts, flats, copied, room, rows, heard, sent, answers))

    def _answer_oldest(self) -> None:
        """Average this worker's share of what was posted first, and give it to all."""
        oldest = self._posted.popleft()
        self._mail.wait(oldest.heard)
        for row in oldest.rows:
            mine = row[self._me]
            self._mail.write(partial(average, row, into=mine))
            for worker in self._others:
                oldest.sent.extend(self._mail.send([mine], worker, TO_ALL))
        for memory in oldest.room:
            self._room.give_back(memory)
        self._averaged.append(oldest)

    def _close_oldest(self) -> None:
        """Wait until what was posted first is averaged everywhere."""
        if not self._averaged:
            self._answer_oldest()
        oldest = self._averaged.popleft()
        self._mail.wait([*oldest.answers, *oldest.sent])  # which hold on to the memory that they were given
        self._mail.close(oldest.parts, oldest.flats)
        self._copies -= oldest.copied
