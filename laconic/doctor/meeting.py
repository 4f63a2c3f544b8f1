"""Where the workers of a doctor's visit meet: torch's store, through which each tells the others JSON text.

The store needs only MASTER_ADDR and MASTER_PORT, so findings can be gathered, and missing workers named, even where
gloo fails to connect every worker to every other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

MOST_BYTES = 2**20
JOIN_S = 30.0
POLL_S = 0.05


class MeetingError(RuntimeError):
    """Workers could not meet. The message says what torch said of it."""


@dataclass(frozen=True)
class Meeting:
    """One worker's seat among the others."""

    store: Store
    worker: int
    workers: int
    timeout_s: float
    absent: set[int] = field(default_factory=set)
    """Who was waited for in vain once is not waited for again."""

    def gather(self, what: str, mine: object) -> list[Any]:
        """Tell the others something, and hear what they tell. None stands for one who said nothing in time."""
        self.store.set(f"{what}/{self.worker}", json.dumps(mine))
        until = time.monotonic() + self.timeout_s
        open_ones = set(range(self.workers))
        heard: dict[int, Any] = {}
        while open_ones:
            for worker in [w for w in open_ones if self._has_said(f"{what}/{w}")]:
                heard[worker] = self._hear(f"{what}/{worker}")
                open_ones.remove(worker)
            if open_ones <= self.absent or time.monotonic() > until:
                break
            time.sleep(POLL_S)
        said = [heard.get(worker) for worker in range(self.workers)]
        self.absent.update(missing(said))
        return said

    def _has_said(self, key: str) -> bool:
        """Asks instead of waiting: after a wait that timed out, a store's client may read the next answer wrongly."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            return bool(self.store.check([key]))
        return False

    def _hear(self, key: str) -> Any:
        try:
            text = self.store.get(key)
            return None if len(text) > MOST_BYTES else json.loads(text)
        except (RuntimeError, ValueError):
            return None

    def leave(self) -> None:
        """Wait until all have heard everything: the store may live in one of these processes."""
        self.gather("leaving", True)
        if self.worker == 0:
            time.sleep(0.2)

    def join_group(self) -> None:
        """Connect every worker to every other, through gloo.

        In a thread of its own: gloo waits without end for one who tries to reach it at a wrong address.
        """
        said: list[str] = []
        thread = threading.Thread(target=self._join, args=(said,), daemon=True)
        thread.start()
        thread.join(JOIN_S)
        if said != [""]:
            raise MeetingError(said[0] if said else f"nobody came within {JOIN_S:g} s")

    def _join(self, said: list[str]) -> None:
        try:
            dist.init_process_group(
                "gloo",
                store=PrefixStore("group", self.store),
                rank=self.worker,
                world_size=self.workers,
                timeout=timedelta(seconds=JOIN_S),
            )
            said.append("")
        except Exception as error:
            said.append(str(error).partition("\n")[0])


def meet(environ: Mapping[str, str], timeout_s: float) -> Meeting:
    """Finds the store that MASTER_ADDR and MASTER_PORT name, or opens it there.

    Torch's own rendezvous would wait until all workers have come, and could not say who has not.
    """
    worker, workers = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    launchers_own = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            workers,
            worker == 0 and not launchers_own,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise MeetingError(str(error).partition("\n")[0]) from error
    return Meeting(
        PrefixStore(f"laconic/doctor/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
        worker,
        workers,
        timeout_s,
    )


def identity() -> str:
    """What tells hosts apart: the name, the kernel's start, and the network that we see."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    network = Path("/proc/self/ns/net")
    return " ".join(
        [
            socket.gethostname(),
            boot.read_text().strip() if boot.exists() else "",
            os.readlink(network) if network.exists() else "",
        ]
    )


def missing(said: Sequence[object]) -> list[int]:
    """Who said nothing."""
    return [worker for worker, each in enumerate(said) if each is None]
