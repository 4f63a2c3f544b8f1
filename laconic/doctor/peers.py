"""The other workers that a launcher started, reached through torch's store.

The store needs only MASTER_ADDR and MASTER_PORT. Findings can be gathered, and missing workers named, even if gloo
cannot connect every worker to every other.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from laconic.comm.timeout import run_in_thread

CONNECT_S = 30.0
POLL_S = 0.05


class NoStoreError(RuntimeError):
    """The store cannot be reached. The message is torch's."""


@dataclass(frozen=True)
class Peers:
    """The workers of a run, as one of them reaches them."""

    store: Store
    worker: int
    workers: int
    timeout_s: float
    missing: set[int] = field(default_factory=set)
    """Workers that did not answer. `gather` does not wait for them again."""

    def gather(self, name: str, value: object, extra_s: float = 0.0) -> list[Any]:
        """Gather a JSON value from every worker, in their order; None for a worker that did not answer in time."""
        self.store.set(f"{name}/{self.worker}", json.dumps(value))
        deadline = time.monotonic() + self.timeout_s + extra_s
        while not self._have_all(name) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        values = [self._get(f"{name}/{worker}") for worker in range(self.workers)]
        self.missing.update(worker for worker, each in enumerate(values) if each is None)
        return values

    def _have_all(self, name: str) -> bool:
        """Poll instead of `store.wait`: after a wait that timed out, a client may read the next answer wrongly."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            return self.store.check([f"{name}/{w}" for w in range(self.workers) if w not in self.missing])
        return False

    def _get(self, key: str) -> Any:
        with contextlib.suppress(RuntimeError, ValueError):
            return json.loads(self.store.get(key)) if self.store.check([key]) else None
        return None

    def leave(self) -> None:
        """Wait until all workers have read everything: the store may live in worker 0's process."""
        self.gather("leaving", True)
        if self.worker == 0:
            time.sleep(0.2)

    def connect_gloo(self) -> str:
        """Connect every worker to every other through gloo; return the error, or an empty string.

        In a thread: gloo waits without a timeout for a peer that was given a wrong address.
        """
        connected = run_in_thread(self._init_process_group)
        try:
            connected.result(CONNECT_S)
        except TimeoutError:
            return f"no connection within {CONNECT_S:g} s"
        except Exception as error:
            return first_line(error)
        return ""

    def _init_process_group(self) -> None:
        store, timeout = PrefixStore("group", self.store), timedelta(seconds=CONNECT_S)
        dist.init_process_group("gloo", store=store, rank=self.worker, world_size=self.workers, timeout=timeout)


def find_peers(environ: Mapping[str, str], timeout_s: float) -> Peers:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; worker 0 opens it unless the launcher has.

    Torch's own rendezvous waits for all workers, and cannot name those that are missing.
    """
    worker, workers = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    try:
        store = TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            workers,
            is_master=worker == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise NoStoreError(first_line(error)) from error
    prefix = f"laconic/doctor/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Peers(PrefixStore(prefix, store), worker, workers, timeout_s)


def host_id() -> str:
    """Return what tells hosts apart: the name, the kernel's boot id and the network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    parts = [boot.read_text().strip(), os.readlink(network)] if boot.exists() and network.exists() else []
    return " ".join([socket.gethostname(), *parts])


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]
