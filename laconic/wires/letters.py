"""Letters from worker to worker, about tensors on the CPU, over gloo.

A collective adds, but does not divide, and wants one tensor of its own. With letters a worker divides its own share
alone, and parts are sent from where they lie, and heard there (`star.py`); the bytes are those of an all-reduce. Where
sums can be passed on, letters only agree on the way, and `ring.py` has connections of its own.

Letters between two workers with one tag arrive in the order of posting, so all is posted ahead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.wires.wire import Part

GROUP = 12 << 20
"""Bytes that are posted together: smaller letters cost calls, larger ones more room."""

BUCKETS = 2 * (25 << 20)
"""What averaging may take of memory: two of DDP's buckets."""

SAYS = 0x6C61636F
"""What our letters are marked with, so that a user's own on the same group are not taken for them."""


class Letters:
    """The letters of one gloo group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Its backend, for a letter needs no dispatcher.
        self.post: Any = group._get_backend(torch.device("cpu"))
        self.me, self.workers = group.rank(), group.size()
        self.others = [(self.me + far) % self.workers for far in range(1, self.workers)]
        self.timeout: timedelta = self.post.options._timeout
        self._given_up = False
        self._writing = threading.Lock()

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for them any more."""
        return self._given_up

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


class Mail:
    """The letters of one correspondence, and how long it waits for each of them."""

    def __init__(self, letters: Letters, limit: timedelta | None) -> None:
        self._limit = limit
        self.limit_s = (limit or letters.timeout).total_seconds()
        self.me, self.workers, self.others = letters.me, letters.workers, letters.others
        self.write = letters.write
        self._post = letters.post
        self.come = 0

    def send(self, some: Iterable[Tensor], worker: int, tag: int) -> list[Any]:
        """Begin to send."""
        return [self._post.send([t], worker, tag) for t in some]

    def receive(self, some: Iterable[Tensor], worker: int, tag: int) -> list[Any]:
        """Begin to receive."""
        return [self._post.recv([t], worker, tag) for t in some]

    def wait(self, works: Iterable[Any]) -> None:
        """Wait until letters have come, or have gone and no longer need the memory that they were given."""
        for work in works:
            work.wait() if self._limit is None else work.wait(self._limit)
            self.come += 1

    def close(self, parts: Sequence[Part], flats: Sequence[Tensor]) -> None:
        """Give each part its mean, in the memory in which it was opened."""
        for part, flat in zip(parts, flats, strict=True):
            self.write(partial(part.close, flat))

    def any_says(self, *words: bool) -> list[bool]:
        """Hear from all workers, for each word, whether one of them says yes to it."""
        said = torch.tensor(words)
        heard = [torch.empty_like(said) for _ in self.others]
        works = [work for other, t in zip(self.others, heard, strict=True) for work in self.receive([t], other, SAYS)]
        self.wait([*works, *(work for other in self.others for work in self.send([said], other, SAYS))])
        found: list[bool] = torch.stack([said, *heard]).any(0).tolist()
        return found


Numbers = TypeVar("Numbers", Part, Tensor)


def in_groups(parts: Iterable[Numbers], cap_bytes: int) -> Iterator[list[Numbers]]:
    """Put parts of one dtype that follow each other together, up to so many bytes. Those of none are left out."""
    group: list[Numbers] = []
    for part in parts:
        if group and (part.dtype != group[0].dtype or sum(each.nbytes for each in group) + part.nbytes > cap_bytes):
            yield group
            group = []
        if part.nbytes:
            group.append(part)
    if group:
        yield group


Flat = TypeVar("Flat", Tensor, memoryview)


def in_shares(flats: Sequence[Flat], workers: int) -> list[list[Flat]]:
    """Cut flat tensors, end to end, into shares of the same size but for one element, as slices of the tensors.

    Or so their memory.

    >>> in_shares([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], workers=2)
    [[tensor([1, 2])], [tensor([3]), tensor([4, 5])]]
    """
    total = sum(map(len, flats))
    shares: list[list[Flat]] = []
    rest, at = deque(flats), 0
    for worker in range(workers):
        wanted = total * (worker + 1) // workers - total * worker // workers
        share = []
        while wanted:
            size = min(wanted, len(rest[0]) - at)
            share.append(rest[0][at : at + size])
            wanted, at = wanted - size, at + size
            if at == len(rest[0]):
                rest.popleft()
                at = 0
        shares.append(share)
    return shares
