"""The other workers that a launcher started: gather through torch's store, connect over gloo, measure links.

The store needs only MASTER_ADDR and MASTER_PORT. Findings can be gathered, and missing workers named, even if gloo
cannot connect every worker to every other. Links go from each worker to the next, as in a ring all_reduce.
"""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any, TypeAlias

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from laconic.comm.timeout import run_in_thread
from laconic.errors import names
from laconic.tools.doctor.finding import Finding, finding
from laconic.tools.launch.links import measure_link
from laconic.tools.units import duration, rate_text

Link: TypeAlias = tuple[float, float]
"""The round trip in seconds and the rate in bit/s, from a worker to the next."""
CONNECT_S, POLL_S = 30.0, 0.05
MUCH_SLOWER = 4.0
FAST_BITS_PER_S = 1e9  # a transfer takes too little time on faster links to compare them


@dataclass(frozen=True)
class Workers:
    """The workers of a run, as worker `own` of `count` reaches them."""

    store: Store
    own: int
    count: int
    timeout_s: float
    missing: set[int] = field(default_factory=set)
    """Workers that did not respond. `gather` does not wait for them again."""

    def gather(self, name: str, value: object, extra_s: float = 0.0) -> list[Any]:
        """Gather a JSON value from every worker, in their order; None for a worker that did not respond in time."""
        self.store.set(f"{name}/{self.own}", json.dumps(value))
        deadline = time.monotonic() + self.timeout_s + extra_s
        values = [self._wait(f"{name}/{w}", 0.0 if w in self.missing else deadline) for w in range(self.count)]
        self.missing.update(worker for worker, each in enumerate(values) if each is None)
        return values

    def _wait(self, key: str, deadline: float) -> Any:
        """Poll instead of `store.wait`: after a wait that timed out, a client may read the next response wrongly."""
        with contextlib.suppress(RuntimeError):  # the store has ended
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_S)
            return json.loads(self.store.get(key))

    def leave(self) -> None:
        """Wait until all workers have read everything: the store may live in worker 0's process."""
        self.gather("leaving", True)
        if self.own == 0:
            time.sleep(0.2)


def find_workers(environ: Mapping[str, str], timeout_s: float) -> Workers:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; worker 0 opens it unless the launcher has.

    Torch's own rendezvous waits for all workers, and cannot name those that are missing.
    """
    own, count = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    served = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    opens = own == 0 and not served
    timeout, address, port = timedelta(seconds=timeout_s), environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    store = TCPStore(address, port, count, opens, timeout, wait_for_workers=False, multi_tenant=True)
    # An agent's store may hold the findings of earlier attempts. Agents count these each for itself, so elsewhere the
    # count would part workers that were restarted together.
    prefix = f"laconic/tools/doctor/{environ.get('TORCHELASTIC_RESTART_COUNT', '0') if served else '0'}"
    return Workers(PrefixStore(prefix, store), own, count, timeout_s)


def check_connections(workers: Workers) -> list[Finding]:
    """Connect every worker to every other over gloo, and measure the links."""
    links = workers.gather("connected", _connect(workers), extra_s=CONNECT_S)
    if not _errors(links):
        links = workers.gather("links", _measure(workers), extra_s=CONNECT_S)
    if failed := _errors(links):
        found = f"{names(list(failed))} cannot connect to all others: {next(iter(failed.values()))}"
        why = "Collectives need a connection between every two workers."
        way_out = "Open all TCP ports between the hosts, and set GLOO_SOCKET_IFNAME to the interface that joins them."
        return [Finding("connections", "problem", found, why, way_out)]
    connected = Finding("connections", "ok", "every worker connects to every other over gloo")
    return [connected, check_links(links)]


def _errors(gathered: Sequence[object]) -> dict[int, str]:
    """Return the errors, by worker: texts are errors, and None is a worker that did not respond."""
    texts = ["no response in time" if each is None else each for each in gathered]
    return {worker: text for worker, text in enumerate(texts) if isinstance(text, str)}


def _connect(workers: Workers) -> bool | str:
    """Connect to all workers; return True, or the error."""
    store, timeout = PrefixStore("group", workers.store), timedelta(seconds=CONNECT_S)

    def connect() -> None:
        dist.init_process_group("gloo", timeout=timeout, world_size=workers.count, rank=workers.own, store=store)

    try:  # in a thread: gloo waits without a timeout for a peer that was given a wrong address
        run_in_thread(connect).result(CONNECT_S)
    except Exception as error:
        return first_line(error) or f"no connection within {CONNECT_S:g} s"
    return True


def _measure(workers: Workers) -> Link | str:
    """Return the measured link to the next worker, or the error."""
    try:
        return measure_link(workers.own, workers.count)
    except RuntimeError as error:
        return f"the connection broke: {first_line(error)}"
    finally:
        dist.destroy_process_group()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return str(error).partition("\n")[0]


def check_links(links: Sequence[Link]) -> Finding:
    """Check that no link is much slower than most; `links[i]` is that of worker i."""
    trips, rates = zip(*links, strict=True)
    usual, slowest, latest = median(rates), rates.index(min(rates)), trips.index(max(trips))
    shown = [f"{i}-{(i + 1) % len(links)} ({rate_text(bps, 3)}, {duration(s)})" for i, (s, bps) in enumerate(links)]
    found = f"median {rate_text(usual, 3)}, slowest link {shown[slowest]}, longest round trip {shown[latest]}"
    why = "Every all_reduce waits for the slowest link."
    way_out = "Look at the cable, Wi-Fi or VPN of these two hosts, or use a plan that synchronises less often."
    return finding("links", min(rates) > min(FAST_BITS_PER_S, usual / MUCH_SLOWER), found, why, way_out, "warning")
