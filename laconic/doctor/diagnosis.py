"""All checks together: of this machine, among the workers of a launcher, and of a user's script."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.checks.outliers import names
from laconic.compare.settings import usable_cores
from laconic.doctor import backends, limits, network, versions
from laconic.doctor.data import check_data, compare_data
from laconic.doctor.finding import Finding, from_json, has_problem, merged, ok, problem
from laconic.doctor.links import MeasuredLink, check_links, measure_link
from laconic.doctor.peers import CONNECT_S, NoStoreError, Peers, find_peers, first_line, host_id
from laconic.doctor.script_findings import check_exits, check_handshake, check_injected
from laconic.doctor.script_run import ScriptRun, WorkerExit, exit_from_json, run_as_worker, run_here


def check_machine(environ: Mapping[str, str], workers: int, local_workers: int, several_hosts: bool) -> list[Finding]:
    """Check this machine, for a run of `workers` of which `local_workers` are on this host."""
    return [
        versions.check_versions(versions.versions_here(), *versions.torch_range()),
        *backends.check_backends(backends.backends_here(), local_workers),
        *network.check_network(network.host_here(), environ, several_hosts),
        *limits.check_limits(environ, workers, local_workers, usable_cores()),
    ]


def check_here(data: Path | None = None, script: ScriptRun | None = None) -> list[Finding]:
    """Check this machine, the data and a dry run of the script."""
    workers = 1 if script is None else script.workers
    findings = check_machine(os.environ, workers, workers, several_hosts=False)
    if data is not None:
        findings.append(check_data(data)[0])
    if script is not None:
        findings += check_handshake(run_here(script)[0])
    return findings


def inject_faults(run: ScriptRun) -> list[Finding]:
    """Run a script with faults on this machine, and report how each worker ended."""
    exits, injected = run_here(run)
    return check_injected(run, injected) + check_exits(run, exits, injected)


def check_as_worker(
    data: Path | None = None, script: ScriptRun | None = None, timeout_s: float = 60.0
) -> tuple[list[Finding], bool]:
    """Check as one of the workers that a launcher has started; return the findings, and whether to show them.

    Worker 0 shows the findings of all. A worker that cannot reach the store shows its own, which no other worker has.
    """
    try:
        peers = find_peers(os.environ, timeout_s)
    except NoStoreError as error:
        return _without_store(os.environ, error), True
    hosts = peers.gather("host", host_id())
    host_count = len(set(hosts) - {None})
    findings = check_machine(os.environ, peers.workers, hosts.count(host_id()), several_hosts=host_count > 1)
    summary: dict[str, str] = {}
    if data is not None:
        finding, summary = check_data(data)
        findings.append(finding)
    fields = {"findings": [asdict(each) for each in findings], "versions": versions.versions_here(), "data": summary}
    findings = _combined(peers.gather("findings", fields), host_count, data is not None)
    if not peers.missing:
        connections = _connections(peers)
        findings += connections
        if script is not None and not has_problem(connections):
            findings += check_handshake(_dry_run(peers, script))
    peers.leave()
    return findings, peers.worker == 0


def _without_store(environ: Mapping[str, str], error: Exception) -> list[Finding]:
    """Check this machine alone, with the problem that no other worker can be reached."""
    workers, local_workers = int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_WORLD_SIZE", "1"))
    store = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    found = f"worker {environ['RANK']} cannot reach the store at {store}: {error}"
    why = "Workers find each other through this store."
    way_out = "Start worker 0 there, and let the firewall admit this port; ping and nc -vz show whether it does."
    findings = check_machine(environ, workers, local_workers, several_hosts=workers > 1)
    return [*findings, problem("workers", found, why, way_out)]


def _combined(gathered: Sequence[Mapping[str, Any] | None], hosts: int, with_data: bool) -> list[Finding]:
    """Merge the findings of all workers, and add those from comparing them."""
    absent = [worker for worker, fields in enumerate(gathered) if fields is None]
    present = [fields for fields in gathered if fields is not None]
    answers = ok("workers", f"all {len(gathered)} workers answer, on {hosts} host{'s' * (hosts != 1)}")
    if absent:
        way_out = "Start it, and check that its host reaches MASTER_ADDR at MASTER_PORT. Look at its own output."
        answers = problem("workers", f"{names(absent)} did not answer", "A run waits for all workers.", way_out)
    own = [
        [] if fields is None else [from_json(each, worker) for each in fields["findings"]]
        for worker, fields in enumerate(gathered)
    ]
    findings = [answers, *merged(own), *versions.compare_versions([fields["versions"] for fields in present])]
    return [*findings, compare_data([fields["data"] for fields in present])] if with_data else findings


def _connections(peers: Peers) -> list[Finding]:
    """Connect every worker to every other through gloo, and measure the links."""
    if peers.workers == 1:
        return []
    errors = _errors(peers.gather("connected", peers.connect_gloo(), extra_s=CONNECT_S))
    if any(errors):
        return [_not_connected(errors)]
    link: dict[str, float] | str
    try:
        link = asdict(measure_link(peers.worker, peers.workers))
    except RuntimeError as error:
        link = f"the connection broke: {first_line(error)}"
    finally:
        dist.destroy_process_group()
    links = peers.gather("links", link, extra_s=CONNECT_S)
    if any(_errors(links)):
        return [_not_connected(_errors(links))]
    connected = ok("connections", "every worker connects to every other over gloo")
    return [connected, check_links([MeasuredLink(**each) for each in links])]


def _errors(values: Sequence[object]) -> list[str]:
    """The error of each worker, where a text is an error and None a worker that did not answer."""
    texts = ["no answer in time" if value is None else value for value in values]
    return [text if isinstance(text, str) else "" for text in texts]


def _not_connected(errors: Sequence[str]) -> Finding:
    failed = [worker for worker, error in enumerate(errors) if error]
    return problem(
        "connections",
        f"{names(failed)} cannot connect to all others: {errors[failed[0]]}",
        "Collectives need a connection between every two workers.",
        "Open all TCP ports between the hosts, and set GLOO_SOCKET_IFNAME to the interface that joins them.",
    )


def _dry_run(peers: Peers, run: ScriptRun) -> list[WorkerExit]:
    """Run the script on all workers, with a store of its own on a free port of worker 0's host."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(peers.gather("port", probe.getsockname()[1])[0])
    ended = run_as_worker(run, peers.worker, port)
    exits = peers.gather("script", asdict(ended), extra_s=run.limit_s)
    return [exit_from_json(worker, fields) for worker, fields in enumerate(exits)]
