"""Averaging worker to worker, in one piece of work that can be waited for like a collective."""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from laconic.wires import letters
from laconic.wires.letters import Letters, Mail
from laconic.wires.means import sums_exactly
from laconic.wires.patience import aside
from laconic.wires.ring import Ring
from laconic.wires.star import Star
from laconic.wires.stream import Stream, meet
from laconic.wires.wire import Part

logger = logging.getLogger(__name__)

ROUND = 16 << 20
"""From this many bytes on sums go round, where they can: for less, it matters how often a word is passed on."""

STOP_S = 1.0
"""How long a worker that gives up waits for its threads to let go of what they were writing to."""


class Correspondents:
    """The workers of one gloo group, who write to each other about tensors on the CPU."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._letters = Letters(group)
        self._stream: Stream | None = None
        self._on_foot = False
        """Whether a worker could not reach its neighbour: then all go by letter for good."""
        self._last: concurrent.futures.Future[Any] | None = None

    def average(self, parts: Sequence[Part], limit_s: float | None) -> Correspondence:
        """Average parts in a thread of its own, after those of earlier calls; each is closed with its mean."""
        # A little longer than anyone is waiting: whoever gave up has done so by then.
        mail = Mail(self._letters, None if limit_s is None else timedelta(seconds=limit_s + 5))
        before = self._last

        def deliver() -> None:
            _work_alone()
            if before is not None:
                before.result()  # letters of two at once could be taken for each other's
            try:
                self._deliver(parts, mail)
            except RuntimeError as error:
                if self._letters.given_up:
                    raise RuntimeError("the letters were given up") from error
                raise

        self._last = aside(deliver)
        return Correspondence(self._last, mail)

    def give_up(self) -> None:
        """From now on nothing that was averaged is changed by this worker, whatever still comes."""
        self._letters.give_up()
        writing = self._stream is not None and self._stream.talking
        self.close()
        if writing and self._last is not None:
            concurrent.futures.wait([self._last], STOP_S)

    def close(self) -> None:
        """Let go of connections; workers that average again make new ones."""
        if self._stream is not None:
            self._stream.stop()

    def _deliver(self, parts: Sequence[Part], mail: Mail) -> None:
        """Average parts over the workers."""
        parts = [part for part in parts if part.nbytes]
        if not parts:
            return
        with torch.no_grad():
            stream = self._around(parts, mail)
            (Star(mail, parts) if stream is None else Ring(mail, parts, stream)).deliver()

    def _around(self, parts: Sequence[Part], mail: Mail) -> Stream | None:
        """Decide, as all workers do, whether sums go round; if so, return the connections for it."""
        if sum(part.nbytes for part in parts) < ROUND or not all(sums_exactly(p.dtype, mail.workers) for p in parts):
            return None
        # Whether memory must be copied differs between workers, and a ring has all copies at once.
        copies = sum(part.nbytes for part in parts if part.copied) > letters.GROUP
        apart = self._stream is None or self._stream.stopped
        copies, on_foot, apart = mail.any_says(copies, self._on_foot, apart)
        if copies or on_foot:
            return None
        if apart:
            self.close()
            self._stream = meet(mail)
            self._on_foot = self._stream is None
            if self._on_foot:
                logger.info("workers cannot reach each other but through gloo, and average their weights more slowly")
        return self._stream


def _work_alone() -> None:
    """Let torch compute in this thread alone: it is new, and would have to start others first, for each round anew."""
    torch.get_num_threads()  # gives a new thread its number, which would undo ours later
    with contextlib.suppress(AttributeError, OSError, TypeError):  # where there is no OpenMP to be told
        ctypes.CDLL(None).omp_set_num_threads(1)


@dataclass(frozen=True, eq=False)
class Correspondence:
    """Parts on their way, to be waited for like a collective.

    A letter cannot be waited for in slices: gloo cuts the connection when time is up. So a thread waits for all.
    """

    _end: concurrent.futures.Future[Any]
    _mail: Mail

    @property
    def come(self) -> int:
        """How many letters have come so far."""
        return self._mail.come

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all, or for so long."""
        try:
            self._end.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise RuntimeError("the letters are still on their way") from None

    def is_completed(self) -> bool:
        """Whether all have ended, well or not."""
        return self._end.done()
