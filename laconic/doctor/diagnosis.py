"""The whole visit: every check of this machine and, among workers of a launcher, what they find out together."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist

from laconic.checks.outliers import names
from laconic.compare.folders import run_folder
from laconic.compare.settings import usable_cores
from laconic.doctor import backends, data, limits, measuring, meeting, network, sockets, versions, visit
from laconic.doctor.finding import Finding, from_json, merged, ok, problem
from laconic.doctor.verdicts import check_faults_made, check_handshake, check_survivors


@dataclass(frozen=True)
class Asked:
    """What a visit is about, beside the machine itself."""

    data: Path | None = None
    visit: visit.Visit | None = None
    timeout_s: float = 60.0
    links_s: float = measuring.LINKS_S


@dataclass(frozen=True)
class Surroundings:
    """How many workers there are, in all and on this host, and whether hosts are several."""

    workers: int = 1
    local_workers: int = 1
    several_hosts: bool = False


def machine(environ: Mapping[str, str], around: Surroundings) -> list[Finding]:
    """What one machine can tell of itself."""
    host = network.host_here()
    listening = sockets.listeners(Path("/proc/net"))
    return [
        versions.check_versions(versions.versions_here(), *versions.torch_range()),
        *backends.check_backends(backends.built_here(), around.local_workers),
        *network.check_interfaces(host, environ, around.several_hosts),
        network.check_name(host),
        *network.check_master(host, environ, around.several_hosts),
        sockets.check_sockets(listening, host.cards, environ),
        backends.check_encryption(backends.torch_libraries(), around.workers),
        *limits.check_limits(environ, around.workers, around.local_workers, usable_cores()),
    ]


def alone(asked: Asked) -> list[Finding]:
    """A visit to one machine."""
    local = 1 if asked.visit is None else asked.visit.workers
    findings = machine(os.environ, Surroundings(local, local))
    if asked.data is not None:
        findings.append(data.check_data(asked.data, data.look_at(asked.data)))
    if asked.visit is not None:
        with run_folder() as folder:
            ended = visit.visit_here(asked.visit, folder)
            attached = [visit.read_attached(folder, each.worker) for each in ended]
        findings += check_handshake(ended, attached)
    return findings


def inject(wanted: visit.Visit) -> list[Finding]:
    """Runs a script with faults on this machine, and says what became of each worker."""
    with run_folder() as folder:
        ended = visit.visit_here(wanted, folder)
        marks = visit.read_marks(folder)
    return check_faults_made(wanted, marks) + check_survivors(wanted, ended, marks)


def among_workers(asked: Asked) -> tuple[list[Finding], bool]:
    """A visit as one of the workers that a launcher has started: its findings, and whether it should show them.

    Worker 0 shows those of all. One who could not even meet the others shows its own: nobody else knows them.
    """
    environ = os.environ
    try:
        seat = meeting.meet(environ, asked.timeout_s)
    except meeting.MeetingError as error:
        workers = int(environ["WORLD_SIZE"])
        guessed = Surroundings(workers, int(environ.get("LOCAL_WORLD_SIZE", "1")), several_hosts=workers > 1)
        return [*machine(environ, guessed), _no_meeting(environ, error)], True
    hosts = seat.gather("host", meeting.identity())
    here = Surroundings(seat.workers, hosts.count(meeting.identity()), len(set(hosts) - {None}) > 1)
    own = machine(environ, here)
    seen = None if asked.data is None else data.look_at(asked.data)
    if asked.data is not None and seen is not None:
        own.append(data.check_data(asked.data, seen))
    told = seat.gather(
        "findings",
        {
            "findings": [asdict(each) for each in own],
            "versions": versions.versions_here(),
            "data": None if seen is None else asdict(seen),
        },
    )
    findings = _together(told, len(set(hosts) - {None}))
    absent = meeting.missing(told)
    if not absent:
        findings += _connected(seat, asked)
    seat.leave()
    return findings, seat.worker == 0


def _together(told: list[Mapping[str, list[Mapping[str, object]]] | None], hosts: int) -> list[Finding]:
    """What all workers say, and what only the comparison of it shows."""
    heard = [said for said in told if said is not None]
    by_worker = [
        [] if said is None else [from_json(each, worker) for each in said["findings"]]
        for worker, said in enumerate(told)
    ]
    absent = meeting.missing(told)
    if absent:
        way_out = "Is it started, and can its host reach MASTER_ADDR at MASTER_PORT? Look at its own output."
        present = problem("workers", f"{names(absent)} did not come", way_out)
    else:
        present = ok("workers", f"all {len(told)} came, on {hosts} host{'s' * (hosts != 1)}")
    compared = versions.compare_versions([dict(said["versions"]) for said in heard])  # type: ignore[arg-type]
    if any(said["data"] for said in heard):
        compared.append(data.compare_data([dict(said["data"] or {}) for said in heard]))  # type: ignore[arg-type]
    return [present, *merged(by_worker), *compared]


def _connected(seat: meeting.Meeting, asked: Asked) -> list[Finding]:
    """What takes connections between all workers."""
    try:
        seat.join_group()
        error = ""
    except meeting.MeetingError as failed:
        error = str(failed)
    patient = replace(seat, timeout_s=seat.timeout_s + meeting.JOIN_S)
    failures = {worker: said for worker, said in enumerate(patient.gather("joined", error)) if said != ""}
    if failures:
        said = next(iter(failures.values()))
        way_out = "Open all TCP ports between the hosts, and set GLOO_SOCKET_IFNAME to the interface that joins them."
        shown = f"{names(list(failures))} could not connect to all others: {said or 'it said nothing in time'}"
        return [problem("connections", shown, way_out)]
    try:
        findings = _measured(seat, asked.links_s)
    except RuntimeError as failed:
        shown = f"a connection broke while it was measured: {str(failed).partition(chr(10))[0]}"
        return [problem("connections", shown, "Is a firewall or a VPN dropping connections? Is a worker gone?")]
    finally:
        dist.destroy_process_group()
    return findings if asked.visit is None else findings + _visited(seat, asked.visit)


def _measured(seat: meeting.Meeting, links_s: float) -> list[Finding]:
    offsets = measuring.measure_clocks(seat.worker, seat.workers)
    links = measuring.measure_links(seat.worker, seat.workers, links_s)
    told = seat.gather("links", [asdict(link) for link in links])
    found = measuring.links_from([link for said in told for link in said or []])
    clocks = [measuring.check_clocks(offsets)] if seat.worker == 0 else []
    return [ok("connections", "every worker reaches every other over gloo"), *clocks, measuring.check_links(found)]


def _visited(seat: meeting.Meeting, wanted: visit.Visit) -> list[Finding]:
    """Each worker runs the script as itself, with a meeting point of its own: the launcher's store knows the doctor."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = int(seat.gather("port", probe.getsockname()[1])[0])
    with run_folder() as folder:
        ended = visit.visit_as_worker(wanted, folder, seat.worker, port)
        patient = replace(seat, timeout_s=wanted.limit_s + seat.timeout_s)
        told = patient.gather("visit", {"ended": asdict(ended), "attached": visit.read_attached(folder, seat.worker)})
    heard = [visit.ended_from(worker, said) for worker, said in enumerate(told)]
    return check_handshake(heard, [None if said is None else said["attached"] for said in told])


def _no_meeting(environ: Mapping[str, str], error: Exception) -> Finding:
    place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
    return problem(
        "workers",
        f"worker {environ['RANK']} could not meet the others at {place}: {error}",
        "Is worker 0 started there? Does a firewall let this port through? ping and nc -vz show it.",
    )
