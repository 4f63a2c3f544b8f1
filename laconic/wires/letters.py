"""Averaging worker to worker: every worker averages its share of each part, and gives it to the others.

A collective adds, but does not divide, and wants one tensor of its own. Here a worker divides its own share alone,
while it is in the cache; and parts are sent from where they lie, and heard there. The bytes are those of a ring.

Letters between two workers arrive in the order of posting, so all is posted ahead. What a worker says of another's
share may be overwritten by what that one answers: it answers when it has heard.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.wires.means import average
from laconic.wires.patience import aside
from laconic.wires.wire import Part

GROUP = 12 << 20
"""Bytes that are posted together: smaller letters cost calls, larger ones more room."""

ROOM = 24 << 20
"""Bytes for what others say of this worker's shares. With the copies of parts these are two of DDP's buckets."""

COPIES = 1
"""How many groups of parts of which one cannot travel from its own memory may be under way, while the next sets out."""

TO_OWNER, TO_ALL = 0x6C61636F, 0x6C616370
"""What our letters are marked with, so that a user's own on the same group are not taken for them."""


class Letters:
    """The letters of one gloo group, about tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.me, self.workers = group.rank(), group.size()
        self.others = [(self.me + far) % self.workers for far in range(1, self.workers)]
        self._last: concurrent.futures.Future[Any] | None = None
        self._given_up = False
        self._writing = threading.Lock()

    def average(self, parts: Sequence[Part], limit_s: float | None) -> Correspondence:
        """Average parts in a thread of its own, after those of earlier calls; each is closed with its mean."""
        # A little longer than anyone is waiting: whoever gave up has done so by then.
        limit = None if limit_s is None else timedelta(seconds=limit_s + 5)
        before = self._last

        post = _Post(self, limit)

        def deliver() -> None:
            if before is not None:
                before.result()  # letters of two at once could be taken for each other's
            post.deliver(parts)

        self._last = aside(deliver)
        return Correspondence(self._last, post)

    def give_up(self) -> None:
        """From now on nothing that was averaged is changed by this worker, whatever still comes."""
        with self._writing:
            self._given_up = True

    def write(self, change: Callable[[], None]) -> None:
        """Change what is averaged, unless it was given up."""
        with self._writing:
            if self._given_up:
                raise RuntimeError("the letters were given up")
            change()

    def send(self, t: Tensor, worker: int, tag: int) -> Any:
        """Begin to send."""
        return self._group.send([t], worker, tag)

    def receive(self, t: Tensor, worker: int, tag: int) -> Any:
        """Begin to receive into `t`."""
        return self._group.recv([t], worker, tag)


@dataclass(frozen=True, eq=False)
class Correspondence:
    """Parts on their way, to be waited for like a collective.

    A letter cannot be waited for in slices: gloo cuts the connection when time is up. So a thread waits for all.
    """

    _end: concurrent.futures.Future[Any]
    _post: _Post

    @property
    def come(self) -> int:
        """How many letters have come so far."""
        return self._post.come

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all, or for so long."""
        try:
            self._end.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("the letters are still on their way") from None

    def is_completed(self) -> bool:
        """Whether all have ended, well or not."""
        return self._end.done()


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


class _Post:
    """One correspondence."""

    def __init__(self, letters: Letters, limit: timedelta | None) -> None:
        self._letters, self._limit = letters, limit
        self._me, self._workers, self._others = letters.me, letters.workers, letters.others
        self._posted: deque[_OnItsWay] = deque()
        self._averaged: deque[_OnItsWay] = deque()
        self._room: list[list[Tensor]] = []
        self._copies = 0
        self.come = 0

    def deliver(self, parts: Sequence[Part]) -> None:
        """Average all parts."""
        groups = list(in_groups(parts, GROUP))
        if not groups:
            return
        share = max(sum(part.nbytes for part in group) for group in groups) // self._workers + 16  # the widest dtype
        ahead = min(len(groups), max(2, ROOM // (share * len(self._others))))
        self._room = [[torch.empty(share, dtype=torch.uint8) for _ in self._others] for _ in range(ahead)]
        with torch.no_grad():
            for group in groups:
                if not self._room:
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
        letters, flats = self._letters, [part.open() for part in parts]
        shares = in_shares(flats, self._workers)
        room = self._room.pop()
        rows = [[mine] * self._workers for mine in shares[self._me]]
        heard, sent, answers = [], [], []
        for worker, place in zip(self._others, room, strict=True):
            free = place[: place.nbytes // flats[0].itemsize * flats[0].itemsize].view(flats[0].dtype)
            for row in rows:
                row[worker], free = free[: row[self._me].numel()], free[row[self._me].numel() :]
                heard.append(letters.receive(row[worker], worker, TO_OWNER))
            for piece in shares[worker]:
                sent.append(letters.send(piece, worker, TO_OWNER))
                answers.append(letters.receive(piece, worker, TO_ALL))
        copied = any(part.is_copy(flat) for part, flat in zip(parts, flats, strict=True))
        self._copies += copied
        self._posted.append(_OnItsWay(parts, flats, copied, room, rows, heard, sent, answers))

    def _answer_oldest(self) -> None:
        """Average this worker's share of what was posted first, and give it to all."""
        oldest = self._posted.popleft()
        self._wait(oldest.heard)
        for row in oldest.rows:
            mine = row[self._me]
            self._letters.write(partial(average, row, into=mine))
            oldest.sent.extend(self._letters.send(mine, worker, TO_ALL) for worker in self._others)
        self._room.append(oldest.room)
        self._averaged.append(oldest)

    def _close_oldest(self) -> None:
        """Wait until what was posted first is averaged everywhere."""
        if not self._averaged:
            self._answer_oldest()
        oldest = self._averaged.popleft()
        self._wait([*oldest.answers, *oldest.sent])  # which hold on to the memory that they were given
        for part, flat in zip(oldest.parts, oldest.flats, strict=True):
            self._letters.write(partial(part.close, flat))
        self._copies -= oldest.copied

    def _wait(self, works: Iterable[Any]) -> None:
        for work in works:
            work.wait() if self._limit is None else work.wait(self._limit)
            self.come += 1


def in_groups(parts: Iterable[Part], cap_bytes: int) -> Iterator[list[Part]]:
    """Put parts of one dtype that follow each other together, up to so many bytes. Those of none are left out."""
    group: list[Part] = []
    for part in parts:
        if group and (part.dtype != group[0].dtype or sum(each.nbytes for each in group) + part.nbytes > cap_bytes):
            yield group
            group = []
        if part.nbytes:
            group.append(part)
    if group:
        yield group


def in_shares(flats: Sequence[Tensor], workers: int) -> list[list[Tensor]]:
    """Cut flat tensors, end to end, into shares of the same size but for one element, as slices of the tensors.

    >>> in_shares([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], workers=2)
    [[tensor([1, 2])], [tensor([3]), tensor([4, 5])]]
    """
    total = sum(flat.numel() for flat in flats)
    shares: list[list[Tensor]] = []
    rest = deque(flats)
    for worker in range(workers):
        wanted = total * (worker + 1) // workers - total * worker // workers
        share = []
        while wanted:
            flat = rest.popleft()
            share.append(flat[:wanted])
            if flat.numel() > wanted:
                rest.appendleft(flat[wanted:])
            wanted -= share[-1].numel()
        shares.append(share)
    return shares
