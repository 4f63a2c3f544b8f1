"""All checks together: of this machine, among the workers of a launcher, and of a user's script."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from laconic.errors import names
from laconic.tools.doctor.data import check_data, compare_data
from laconic.tools.doctor.finding import Finding, finding, has_problem, merged
from laconic.tools.doctor.machine import check_machine, compare_versions
from laconic.tools.doctor.script import ScriptRun, WorkerExit, check_handshake, run_as_worker, run_here
from laconic.tools.doctor.workers import Workers, check_connections, find_workers, first_line
from laconic.tools.launch.workers import LOOPBACK
from laconic.tools.machine import host_id, versions


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
