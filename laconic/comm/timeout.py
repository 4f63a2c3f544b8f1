"""How long a worker waits for the others, and what it says when that was too long.

A gloo worker whose neighbour dies is told so at once, but the others in the ring wait for the whole timeout of their
group, 30 minutes by default; and nobody is told of a worker that merely stands still. So waits are cut into slices.
Between two slices a worker looks at a key in the group's store, the alarm, which the first to notice sets. And it gives
up by itself after a limit taken from the rounds so far. Then all who still answer say so in the store, and the error
names those who do not. While all goes well the store is not touched.

A TCP store's client waits for ever for a host that is cut off from it. So it is asked by a thread, and whoever asks
waits for a few seconds at most.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed import PrefixStore

from laconic.checks.outliers import names
from laconic.torch_private.distributed import default_store

SLICE = timedelta(milliseconds=250)
LEAST_S = 30.0
"""Nobody is given up before this, however fast rounds have been."""
FIRST_S = 300.0
"""The limit while there is nothing to go by: workers may start up at different times."""
TIMES_LONGEST = 10.0
ANSWER_S = 0.8
"""How long those who noticed wait for each other's word."""
STORE_S = 10.0
"""How long the store may take to answer; from then on it counts as gone, unless it answers after all."""


class LostWorkerError(RuntimeError):
    """A worker died, stands still or was cut off. `missing` are those who did not answer, by their index."""

    def __init__(self, message: str, missing: list[int]) -> None:
        super().__init__(message)
        self.missing = missing


class Work(Protocol):
    """A collective on its way."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait for it."""
        ...

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""
        ...


class CollectiveTimeout:
    """One group's waits. `limit_s` fixes the limit; None takes it from measured rounds."""

    def __init__(self, group: dist.ProcessGroup, limit_s: float | None = None) -> None:
        self._me, self._workers = group.rank(), group.size()
        self._limit_s = limit_s
        self._measured: deque[float] = deque(maxlen=100)
        self._store = PrefixStore(f"laconic/{group.group_name}", default_store())
        self._asked: Future[Any] | None = None
        self._given_up = False

    @property
    def limit_s(self) -> float:
        """How long the next collective may take."""
        if self._limit_s is not None:
            return self._limit_s
        if len(self._measured) < 5:
            return FIRST_S
        return max(LEAST_S, TIMES_LONGEST * max(self._measured))

    def cancel(self) -> None:
        """Let the wait that is under way end at its next slice: nobody needs its answer any more."""
        self._given_up = True

    def wait(self, work: Work, what: str) -> None:
        """Wait for a collective; `what` says which one, for the error."""
        begun = time.monotonic()
        while True:
            try:
                if ended(work):
                    self._measured.append(time.monotonic() - begun)
                    return
            except RuntimeError as error:
                self._sound_alarm(what)
                raise self._lost(what, f"the connection broke ({_first_line(error)})") from error
            waited = time.monotonic() - begun
            if self._given_up:
                raise LostWorkerError(f"{what} was abandoned.", [])
            if (alarm := self._alarm()) is not None:
                raise self._lost(what, alarm)
            if waited > self.limit_s:
                self._sound_alarm(what)
                raise self._lost(what, f"nothing came for {waited:.1f} s, and {self.limit_s:.1f} s are the limit")

    def _alarm(self) -> str | None:
        with contextlib.suppress(RuntimeError):  # a store that is gone: then the limit decides
            if self._ask("check", ["alarm"]):
                said = json.loads(self._ask("get", "alarm"))
                return f"worker {said['worker']} gave the alarm in {said['what']}"
        return None

    def _sound_alarm(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._ask("set", "alarm", json.dumps({"worker": self._me, "what": what}))

    def _lost(self, what: str, why: str) -> LostWorkerError:
        missing = self._missing()
        if missing is None:
            return LostWorkerError(
                f"{what}: {why}, and the store through which workers find each other does not answer. "
                "The worker that holds it is gone, or cut off from here: start the run again from its last checkpoint.",
                [],
            )
        who = "all workers answer, but one of them was late" if not missing else names(missing) + " did not answer"
        return LostWorkerError(
            f"{what}: {why}; {who}.\n  Nobody can average without all workers. Go on without the missing ones "
            "(session.regroup), or start the run again from its last checkpoint.",
            missing,
        )

    def _missing(self) -> list[int] | None:
        """Say that we are here, wait a little for the others to say so, and list those who have not."""
        try:
            self._ask("set", f"here/{self._me}", "")
            until = time.monotonic() + ANSWER_S
            while True:
                missing = [w for w in range(self._workers) if not self._ask("check", [f"here/{w}"])]
                if not missing or time.monotonic() > until:
                    return missing
                time.sleep(0.05)
        except RuntimeError:
            return None

    def _ask(self, name: str, *args: Any) -> Any:
        """Call the store, unless it still owes an answer."""
        if self._asked is None or self._asked.done():
            answer = self._asked = run_in_thread(lambda: getattr(self._store, name)(*args))
            with contextlib.suppress(Late):
                return answer.result(STORE_S)
        raise RuntimeError(f"the store has not answered for {STORE_S:g} s.")


def run_in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Let a thread make a call that may never come back, and may be forgotten then."""
    answer: Future[Any] = Future()

    def make() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=make, name="laconic-aside", daemon=True).start()
    return answer


def ended(work: Work) -> bool:
    """Wait for a slice of time; tell whether a collective has ended well, and raise if it has not ended well.

    One that ends just after its slice is asked again: the first error was only that of the slice.
    """
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(SLICE)
    return True


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].rpartition("] ")[2].split(". This is")[0]
