"""The thread of a queue: it takes what was submitted, in order, and ends with the queue or with the interpreter."""

from __future__ import annotations

import queue
import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch

from laconic.comm.running import Running
from laconic.comm.timeout import CollectiveTimeout

if TYPE_CHECKING:
    from laconic.comm.queue import CollectiveQueue


@dataclass(frozen=True)
class Flush:
    """Queued after the last exchange of a batch: run all of them to their end; if `void`, none keeps its state."""

    void: bool


@dataclass(frozen=True)
class EndThread:
    """Ends the thread."""


Items: TypeAlias = "queue.SimpleQueue[Running | Flush | EndThread]"


def start_thread(collectives: CollectiveQueue, items: Items) -> threading.Thread:
    """Start the thread of a queue."""
    thread = threading.Thread(target=_serve, args=(weakref.ref(collectives), items), daemon=True)
    thread.name = f"laconic-collectives-{collectives.level}"
    thread.start()
    return thread


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


def _serve(collectives: weakref.ref[CollectiveQueue], items: Items) -> None:
    """Serve the queue. It holds no reference while it waits, so that an unused queue can be collected."""
    with torch.no_grad():
        while True:
            try:
                item = items.get(timeout=5)
            except queue.Empty:
                if collectives() is None:
                    return
                continue
            serving = collectives()
            if isinstance(item, EndThread) or serving is None:
                return
            serving.serve(item)
            del serving, item
