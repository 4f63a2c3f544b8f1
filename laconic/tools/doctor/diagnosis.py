"""All checks together: of this machine, of a user's script, and among the workers that a launcher has started.

Workers gather their findings through torch's store, which needs only MASTER_ADDR and MASTER_PORT. So they arrive, and
missing workers are named, even if gloo cannot connect every worker to every other. Links are measured from each worker
to the next, as in a ring all_reduce.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from laconic.comm.timeout import run_in_thread
from laconic.errors import names
from laconic.tools.doctor.checks import (
    Finding,
    check_data,
    check_machine,
    compare_data,
    compare_versions,
    finding,
    has_problem,
    merged,
)
from laconic.tools.doctor.script import ScriptRun, WorkerExit, check_handshake, run_as_worker, run_here
from laconic.tools.launch.workers import LOOPBACK
from laconic.tools.machine import host_id, versions
from laconic.tools.units import duration, rate_text

Link: TypeAlias = tuple[float, float]
"""The round trip in seconds and the rate in bit/s, from a worker to the next."""
CONNECT_S, POLL_S = 30.0, 0.05
REPEATS, PING_BYTES, TRANSFER_BYTES = 3, 8, 1 << 20  # of a measured link
MUCH_SLOWER = 4.0
FAST_BITS_PER_S = 1e9  # a transfer takes too little time on faster links to compare them


def check_here(data: Path | None = None, script: ScriptRun | None = None) -> list[Finding]:
    """Check this machine, the data and a dry run of the script."""
    workers = 1 if script is None else script.workers
    findings = check_machine(os.environ, workers, workers, several_hosts=False)
    if data is not None:
        findings.append(check_data(data)[0])
    if script is not None:
        findings += check_handshake(run_here(script)[0])
    return findings


def check_as_worker(
    data: Path | None = None, script: ScriptRun | None = None, timeout_s: float = 60.0
) -> tuple[list[Finding], bool]:
    """Check as one of the workers that a launcher has started; return the findings, and whether to show them.

    Worker 0 shows the findings of all. A worker that cannot reach the store shows its own, which no other worker has.
    """
    try:
        workers = find_workers(os.environ, timeout_s)
    except RuntimeError as error:
        return _without_store(first_line(error)), True
    hosts = workers.gather("host", host_id())
    host_count = len(set(hosts) - {None})
    findings = check_machine(os.environ, workers.count, hosts.count(host_id()), several_hosts=host_count > 1)
    summary: dict[str, str] = {}
    if data is not None:
        data_finding, summary = check_data(data)
        findings.append(data_finding)
    fields = {"findings": [asdict(each) for each in findings], "versions": versions(), "data": summary}
    findings = _combined(workers.gather("findings", fields), host_count, data is not None)
    if not workers.missing:
        connections = check_connections(workers) if workers.count > 1 else []
        findings += connections
        if script is not None and not has_problem(connections):
            findings += check_handshake(_dry_run(workers, script))
    workers.leave()
    return findings, workers.own == 0


def _without_store(error: str) -> list[Finding]:
    """Check this machine alone, with the problem that no other worker can be reached."""
    workers, local_workers = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    worker, address, port = (os.environ[name] for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"))
    found = f"worker {worker} cannot reach the store at {address}:{port}: {error}"
    why = "Workers find each other through this store."
    way_out = "Start worker 0 there, and let the firewall admit this port; ping and nc -vz show whether it does."
    findings = check_machine(os.environ, workers, local_workers, several_hosts=workers > 1)
    return [*findings, Finding("workers", "problem", found, why, way_out)]


def _combined(gathered: Sequence[Mapping[str, Any] | None], hosts: int, with_data: bool) -> list[Finding]:
    """Merge the findings of all workers, and add those from comparing them."""
    present = {worker: fields for worker, fields in enumerate(gathered) if fields is not None}
    absent = [worker for worker in range(len(gathered)) if worker not in present]
    found = f"all {len(gathered)} workers answer, on {hosts} host{'s' * (hosts != 1)}"
    way_out = "Start it, and check that its host reaches MASTER_ADDR at MASTER_PORT. Look at its own output."
    found = f"{names(absent)} did not respond" if absent else found
    findings = [finding("workers", not absent, found, "A run waits for all workers.", way_out)]
    own = [(worker, each) for worker, fields in present.items() for each in fields["findings"]]
    findings += merged([Finding(**each | {"workers": (worker,)}) for worker, each in own], len(gathered))
    findings += compare_versions([fields["versions"] for fields in present.values()])
    return [*findings, compare_data([fields["data"] for fields in present.values()])] if with_data else findings


def _dry_run(workers: Workers, run: ScriptRun) -> list[WorkerExit]:
    """Run the script on all workers, with a store of its own on a free port of worker 0's host."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False) if workers.own == 0 else None
    port = workers.gather("port", store.port if store else 0)[0]
    exits = workers.gather("script", asdict(run_as_worker(run, int(port))), extra_s=run.limit_s)
    return [WorkerExit(**fields or {"worker": worker, "killed": "no response"}) for worker, fields in enumerate(exits)]


# The other workers.


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


def measure_link(worker: int, workers: int) -> tuple[float, float]:
    """Measure the link to the next worker on the default group: the round trip in seconds, and the rate in bit/s.

    All workers call it, and measure at once, as in a ring all_reduce.
    """
    following, previous = (worker + 1) % workers, (worker - 1) % workers
    ping_s = min(_round_trip_s(following, previous, PING_BYTES) for _ in range(REPEATS))
    transfer_s = min(_round_trip_s(following, previous, TRANSFER_BYTES) for _ in range(REPEATS))
    return ping_s, 16 * TRANSFER_BYTES / max(transfer_s - ping_s, transfer_s / 10)


def _round_trip_s(following: int, previous: int, size: int) -> float:
    """Return the seconds until `size` bytes came back from the next worker."""
    sent, received, returned = torch.zeros(3, size, dtype=torch.uint8)
    dist.barrier()
    start = time.perf_counter()
    sends = [dist.isend(sent, dst=following)]
    dist.recv(received, src=previous)
    sends.append(dist.isend(received, dst=previous))
    dist.recv(returned, src=following)
    took = time.perf_counter() - start
    for work in filter(None, sends):
        work.wait()
    return took


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
