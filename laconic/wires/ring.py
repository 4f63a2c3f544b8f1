"""Averaging where sums go round: each share once to be added up, by one worker after the other, and once to be told.

A worker talks to its neighbours only, and adds what it has just heard, while that is in the cache. Between machines a
ring says less than a star: only those at the ends of a machine's row of workers talk to another machine. But sums must
be exact enough to be passed on, and a word takes `2 (workers - 1)` letters to reach everybody: it is for large models.

All workers must take the same steps: each waits for the one before it. So this depends on shapes and dtypes alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from functools import partial

import torch
from torch import Tensor

from laconic.wires import letters
from laconic.wires.letters import Mail, Room, in_shares
from laconic.wires.wire import Part

TO_ADD, TO_TELL = letters.SAYS + 0x10000, letters.SAYS + 0x20000
"""And how often a letter has been passed on."""

_END = object()


class Ring:
    """One correspondence about groups of parts."""

    def __init__(self, mail: Mail, groups: Sequence[Sequence[Part]]) -> None:
        self._mail, self._groups = mail, groups
        self._before, self._after = (mail.me - 1) % mail.workers, (mail.me + 1) % mail.workers
        self._room = Room(groups, mail.workers)

    def deliver(self) -> None:
        """Average all parts, and close them with their means: at each beat a group sets out, and others pass on."""
        hops = len(self._mail.others)
        held = sum(range(2, hops + 1)) + hops  # shares: from when a lap sets out until each has been passed on
        rest = max(1, (letters.BUCKETS - letters.GROUP) // (self._room.share * held))
        waiting = iter(self._groups)
        laps: list[tuple[int, Generator[None, None, None]]] = []
        for beat in itertools.count():
            laps = [(since, lap) for since, lap in laps if (beat - since) % rest or _goes_on(lap)]
            group = next(waiting, None)
            if group is not None:
                lap = self._lap(group)
                next(lap)
                laps.append((beat, lap))
            elif not laps:
                return

    def _lap(self, parts: Sequence[Part]) -> Generator[None, None, None]:
        """Average parts; after each letter that is passed on, let others go."""
        mail, workers = self._mail, self._mail.workers
        flats = [part.open() for part in parts]
        shares = in_shares(flats, workers)
        shares = [shares[(mail.me - hop) % workers] for hop in range(workers)]  # in the order in which they come by
        # All is expected before it is sent: a letter that nobody expects waits for its reader, and takes two more.
        places = [self._room.take(like=share) for share in shares[1:]]
        coming = [mail.receive(sums, self._before, TO_ADD + hop) for hop, (_, sums) in enumerate(places)]
        told = [mail.receive(share, self._before, TO_TELL + hop) for hop, share in enumerate(shares[:-1])]
        going = mail.send(shares[0], self._after, TO_ADD)
        for hop, (_, sums) in enumerate(places):
            own, whole = shares[hop + 1], hop == workers - 2
            yield
            mail.wait(coming[hop])
            if hop == 0:
                for said in sums:
                    said.mul_(1 / workers)  # before it is added to, so that nothing overflows
            add = partial(_add, sums, own, own if whole else sums, 1 / workers)
            mail.write(add) if whole else add()
            mail.wait(going)
            going = mail.send(own, self._after, TO_TELL) if whole else mail.send(sums, self._after, TO_ADD + hop + 1)
            for memory, _ in places[hop - 1 : hop] + (places[hop:] if whole else []):
                self._room.give_back(memory)
        for hop in range(workers - 1):
            yield
            mail.wait(told[hop])
            if hop < workers - 2:
                going += mail.send(shares[hop], self._after, TO_TELL + hop + 1)
        mail.wait(going)
        mail.close(parts, flats)


def _goes_on(lap: Generator[None, None, None]) -> bool:
    """Let a lap go on, and tell whether it is still under way."""
    return next(lap, _END) is not _END


def _add(sums: Sequence[Tensor], own: Sequence[Tensor], into: Sequence[Tensor], scale: float) -> None:
    for sum_, weight, place in zip(sums, own, into, strict=True):
        torch.add(sum_, weight, alpha=scale, out=place)
