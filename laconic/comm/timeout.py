"""How long a worker waits for a collective, and which peers it names when that was too long.

A gloo worker whose direct peer dies gets an error at once, but the others wait for the whole timeout of their group, 30
minutes by default; and no worker gets an error for a peer that is only stopped. So waits are cut into slices. Between
two slices a worker looks at one key in the group's store, the alarm, which the first worker with an error sets. Without
an alarm, a worker gives up after a limit taken from earlier collectives. Then all workers that still respond write so
into the store, and the error names those that do not. As long as no wait takes longer than a slice, the store is
not used.

A worker that is away on purpose says so in the store, and for how long at most. The others look for it where they would
give up, and wait on until it is back or that time has passed.

The client of a TCP store waits for ever for a host that is disconnected from it. So a thread calls the store, and the
caller waits for it a few seconds at most.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from laconic.errors import LostWorkerError, names
from laconic.torch_private.distributed import group_store
from laconic.values import is_number

SLICE = timedelta(milliseconds=250)
LEAST_S = 30.0
"""The lowest limit, however fast collectives have been."""
FIRST_S = 300.0
"""The limit until five collectives were measured: workers may start up at different times."""
TIMES_LONGEST = 10.0
RESPONSE_S = 0.8
"""How long workers with an error wait for each other's response."""
STORE_S = 10.0
"""How long the store may take to respond; after that it counts as lost, until it responds after all."""


def check_timeout_s(timeout_s: float | None) -> None:
    """Refuse what is not a number of seconds above 0. None is valid: the limit follows from earlier collectives."""
    if timeout_s is not None and not (is_number(timeout_s) and timeout_s > 0):
        raise ValueError(
            f"attach(timeout_s={timeout_s!r}): it must be a number of seconds above 0, such as 60. Leave it out to "
            "wait ten times as long as the longest collective so far; for a worker that is away on purpose, there is "
            "session.away()."
        )


class Work(Protocol):
    """A collective in flight."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait for it."""
        ...

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error."""
        ...


class CollectiveTimeout:
    """Waits for the collectives of one group. `limit_s` fixes the limit; None takes it from earlier collectives."""

    def __init__(self, group: dist.ProcessGroup, limit_s: float | None = None) -> None:
        self._me, self._workers = group.rank(), group.size()
        self._limit_s = limit_s
        self._measured: deque[float] = deque(maxlen=100)
        self._store = group_store(group)
        self._call: Future[Any] | None = None
        self._cancelled = False

    @property
    def limit_s(self) -> float:
        """How long the next collective may take."""
        if self._limit_s is not None:
            return self._limit_s
        if len(self._measured) < 5:
            return FIRST_S
        return max(LEAST_S, TIMES_LONGEST * max(self._measured))

    def cancel(self) -> None:
        """End the wait in progress, and every later one, after its slice: the result is not needed any more."""
        self._cancelled = True

    @contextlib.contextmanager
    def away(self, limit_s: float) -> Iterator[None]:
        """Tell the other workers that this one is away on purpose, for at most `limit_s`."""
        self._say_away(limit_s)
        try:
            yield
        finally:
            self._say_away(0)

    def _say_away(self, limit_s: float) -> None:
        with contextlib.suppress(RuntimeError):  # the store is lost: the others will not wait for this worker
            self._call_store("set", f"away/{self._me}", str(limit_s))
            self._call_store("set", "away", "")

    def _away(self) -> dict[int, float]:
        """Return the workers that are away now, and for how long at most."""
        found: dict[int, float] = {}
        with contextlib.suppress(RuntimeError):
            if self._call_store("check", ["away"]):
                for worker in range(self._workers):
                    if self._call_store("check", [f"away/{worker}"]):
                        found[worker] = float(self._call_store("get", f"away/{worker}"))
        return {worker: limit_s for worker, limit_s in found.items() if limit_s}

    def wait(self, work: Work, what: str) -> None:
        """Wait for a collective; `what` describes it in errors."""
        start = since = time.monotonic()
        away_since: float | None = None
        while True:
            # 1. one slice of waiting for the collective itself
            try:
                if ended(work):
                    if since == start:  # else it took so long because a worker was away
                        self._measured.append(time.monotonic() - start)
                    return
            except RuntimeError as error:
                self._set_alarm(what)
                raise self._lost(what, f"the connection broke ({_first_line(error)})") from error
            if self._cancelled:
                raise LostWorkerError(f"{what} was abandoned.", [])
            # 2. has another worker set the alarm? What the store takes to answer does not count.
            now = time.monotonic()
            if (alarm := self._alarm()) is not None:
                raise self._lost(what, alarm)
            # 3. after the limit: wait on for a worker that is away on purpose, and once more as long when it is back
            if now - since <= self.limit_s:
                continue
            away = self._away()
            away_since = now if away_since is None else away_since
            if away and now - away_since <= max(away.values()):
                continue
            if not away and now > away_since:  # it is back, and has as long as any other worker
                since, away_since = now, None
                continue
            # 4. give up, and let the others know
            self._set_alarm(what)
            raise self._lost(what, f"no result for {now - start:.1f} s, and the limit is {self.limit_s:.1f} s")

    def _alarm(self) -> str | None:
        with contextlib.suppress(RuntimeError):  # the store is lost: then the limit decides
            if self._call_store("check", ["alarm"]):
                alarm = json.loads(self._call_store("get", "alarm"))
                return f"worker {alarm['worker']} set the alarm in {alarm['what']}"
        return None

    def _set_alarm(self, what: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._call_store("set", "alarm", json.dumps({"worker": self._me, "what": what}))

    def _lost(self, what: str, why: str) -> LostWorkerError:
        missing = self._missing()
        if missing is None:
            return LostWorkerError(
                f"{what}: {why}, and the store through which workers find each other does not respond. "
                "Its host is lost, or disconnected from this worker: start the run again from its last checkpoint.",
                [],
            )
        who = "all workers respond, but one of them was late" if not missing else names(missing) + " did not respond"
        return LostWorkerError(
            f"{what}: {why}; {who}.\n  No average is possible without all workers. Go on without the missing ones "
            "(session.regroup), or start the run again from its last checkpoint.",
            missing,
        )

    def _missing(self) -> list[int] | None:
        """Register this worker as responding, wait a little for the others, and list those that have not done so.

        A worker that is away on purpose cannot respond: it is listed only where all others do.
        """
        try:
            self._call_store("set", f"here/{self._me}", "")
            until = time.monotonic() + RESPONSE_S
            while True:
                missing = self._without("here", range(self._workers))
                if not missing or time.monotonic() > until:
                    away = self._away()
                    return [w for w in missing if w not in away] or missing
                time.sleep(0.05)
        except RuntimeError:
            return None

    def _without(self, key: str, workers: Sequence[int]) -> list[int]:
        """List the workers that have not set their key: one call if all have, and few for each that has not."""
        if self._call_store("check", [f"{key}/{worker}" for worker in workers]):
            return []
        if len(workers) == 1:
            return list(workers)
        middle = len(workers) // 2
        return [*self._without(key, workers[:middle]), *self._without(key, workers[middle:])]

    def _call_store(self, name: str, *args: Any) -> Any:
        """Call the store, unless an earlier call has not returned yet."""
        if self._call is None or self._call.done():
            call = self._call = run_in_thread(lambda: getattr(self._store, name)(*args))
            with contextlib.suppress(TimeoutError):
                return call.result(STORE_S)
        raise RuntimeError(f"the store has not responded for {STORE_S:g} s.")


def run_in_thread(call: Callable[[], Any]) -> Future[Any]:
    """Run a call that may never return in a daemon thread, which the caller may leave behind."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="laconic-call", daemon=True).start()
    return future


def ended(work: Work) -> bool:
    """Wait for one slice; return whether a collective has ended, and raise its error if it has one.

    A collective that ends just after its slice is waited for again: the first error was only that of the slice.
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
