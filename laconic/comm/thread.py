"""The thread of a queue: it takes what was submitted, in order, and ends with the queue or with the interpreter."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import TypeAlias

from laconic.comm.running import Running
from laconic.comm.timeout import CollectiveTimeout


@dataclass(frozen=True)
class Flush:
    """Queued after the last exchange of a batch: run all of them to their end; if `void`, none keeps its state.

    `since_s` is when the caller began to wait for it; None if it goes on meanwhile.
    """

    void: bool
    since_s: float | None


@dataclass(frozen=True)
class EndThread:
    """Ends the thread."""


Items: TypeAlias = "queue.SimpleQueue[Running | Flush | EndThread]"


def end_thread(items: Items, thread: threading.Thread, timeout_s: float = 10) -> bool:
    """End the thread of a queue after what is queued; return whether it has ended."""
    items.put(EndThread())
    if thread is not threading.current_thread():
        thread.join(timeout_s)
    return not thread.is_alive()


def leave_thread(items: Items, thread: threading.Thread, timeout: CollectiveTimeout | None) -> None:
    """End the thread of a queue that nobody has closed, soon also if it waits for another worker."""
    if not end_thread(items, thread, timeout_s=1) and timeout is not None:
        timeout.cancel()
        thread.join(10)
