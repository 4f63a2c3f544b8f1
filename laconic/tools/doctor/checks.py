"""Findings, and the checks of one machine: versions, devices, addresses, limits, threads, the training data."""

import hashlib
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Literal, TypeAlias

import torch
import torch.distributed as dist

from laconic.errors import names, outliers
from laconic.tools.machine import other_project, usable_cores, versions

Severity: TypeAlias = Literal["ok", "warning", "problem"]

GLOO = "gloo's interface"
LOOPBACKS = ("lo", "lo0")
NOT_REACHABLE = "Workers on other hosts cannot connect to this one."
TORCH, NEXT_TORCH = "2.11", "3"  # the range in pyproject.toml
LEAST_FILES = 1024
FILES_PER_WORKER = 64  # sockets of a few process groups, pipes of data loaders, files of the run
LEAST_SHARED_BYTES = 2**30
SHARED_MEMORY = Path("/dev/shm")
BLOCK_BYTES, SAMPLED_FILES = 4096, 256  # that are read of the training data
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroups v2


@dataclass(frozen=True)
class Finding:
    """The result of one check. With a problem the run fails or trains on wrong values; with a warning it may be slow.

    `why` and `way_out` are empty if the severity is "ok".
    """

    name: str
    severity: Severity
    found: str
    why: str = ""
    way_out: str = ""
    workers: tuple[int, ...] = ()
    """The workers that the finding is about. Empty: this machine, or all workers."""


def finding(name: str, fine: bool, found: str, why: str, way_out: str, otherwise: Severity = "problem") -> Finding:
    """Make a finding that is "ok" if `fine`, else `otherwise`."""
    return Finding(name, "ok", found) if fine else Finding(name, otherwise, found, why, way_out)


def has_problem(findings: Iterable[Finding]) -> bool:
    """Return whether there is at least one problem."""
    return any(each.severity == "problem" for each in findings)


def merged(findings: Sequence[Finding], workers: int) -> list[Finding]:
    """Merge the equal findings of several workers into one that lists these workers, in the order of the checks."""
    workers_of: dict[Finding, tuple[int, ...]] = {}
    for each in findings:
        key = replace(each, workers=())
        workers_of[key] = workers_of.get(key, ()) + each.workers
    names = list(dict.fromkeys(each.name for each in workers_of))
    ordered = sorted(workers_of, key=lambda each: names.index(each.name))
    return [each if len(workers_of[each]) == workers else replace(each, workers=workers_of[each]) for each in ordered]


# This machine.


def check_machine(environ: Mapping[str, str], workers: int, local_workers: int, several_hosts: bool) -> list[Finding]:
    """Check this machine, for a run of `workers` of which `local_workers` are on this host."""
    nccl, devices = dist.is_nccl_available(), range(torch.cuda.device_count())
    quota = cpu_quota(CPU_QUOTA.read_text()) if CPU_QUOTA.is_file() else None
    return [
        check_versions(versions()),
        *check_distributions(),
        check_gloo(dist.is_gloo_available(), nccl),
        check_devices([torch.cuda.get_device_name(i) for i in devices], nccl, bool(torch.version.cuda), local_workers),
        *check_addresses(environ, several_hosts),
        check_files(open_files(), workers),
        check_shared(shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None),
        check_threads(environ, local_workers, usable_cores(), quota),
    ]


def check_versions(found: Mapping[str, str]) -> Finding:
    """Check that laconic supports this version of torch."""
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    if _numbers(found["torch"]) < _numbers(TORCH):
        why, way_out = f"laconic needs torch {TORCH} or newer.", f"pip install 'torch>={TORCH}'."
        return Finding("versions", "problem", shown, why, way_out)
    why, way_out = f"laconic is not tested with torch {NEXT_TORCH} or newer.", f"pip install 'torch<{NEXT_TORCH}'."
    return finding("versions", _numbers(found["torch"]) < _numbers(NEXT_TORCH), shown, why, way_out, "warning")


def check_distributions() -> list[Finding]:
    """Check that no other project has installed its files among those of laconic."""
    other = other_project()
    return [] if other is None else [Finding("distributions", "warning", *other)]


def _numbers(version: str) -> tuple[int, ...]:
    """The major and the minor number."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def compare_versions(by_worker: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Check that all workers have the same versions; a different Python is only a warning."""
    findings = []
    for package in ("laconic", "torch", "python"):
        usual, odd = outliers([each[package] for each in by_worker])
        if odd:
            shown = f"{package} {by_worker[odd[0]][package]} on {names(odd)}, {usual} on the others"
            why = "laconic.attach refuses workers with different versions."
            why = "Workers may shuffle data or load files differently." if package == "python" else why
            severity: Severity = "warning" if package == "python" else "problem"
            findings.append(Finding("same versions", severity, shown, why, f"Install the same {package} on all hosts."))
    return findings or [Finding("same versions", "ok", f"the same on all {len(by_worker)} workers")]


def check_gloo(gloo: bool, nccl: bool) -> Finding:
    """Check that torch was built with gloo."""
    found = f"gloo is available; NCCL is {'available' if nccl else 'not (it needs CUDA)'}"
    why, way_out = "CPU tensors cannot be averaged without it.", "Install torch's own wheels: pip install torch."
    return finding("gloo", gloo, found if gloo else "this torch was built without gloo", why, way_out)


def check_devices(devices: Sequence[str], nccl: bool, cuda_built: bool, local_workers: int) -> Finding:
    """Check the CUDA devices, given by their names, for the workers of this host."""
    shown = ", ".join(devices)
    if not devices and not cuda_built:
        return Finding("devices", "ok", "no CUDA: models train on the CPU, over gloo")
    if not devices:
        found, why = "torch was built for CUDA and finds no device", "Models train on the CPU."
        way_out = "Check nvidia-smi, CUDA_VISIBLE_DEVICES and, in a container, --gpus all."
        return Finding("devices", "warning", found, why, way_out)
    if not nccl:
        why = "gloo copies CUDA tensors through host memory, which is slow."
        return Finding("devices", "warning", f"{shown}; no NCCL", why, "Install torch's CUDA wheels.")
    enough = len(devices) >= local_workers
    shown += "" if enough else f": {len(devices)} for {local_workers} workers on this host"
    why, way_out = "NCCL needs a device for each worker.", "Start as many workers as there are devices."
    return finding("devices", enough, shown, why, way_out, "warning")


def check_addresses(environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    """Check the addresses of this host and of worker 0."""
    interfaces = [name for _, name in socket.if_nameindex()]
    chosen, host, master = environ.get("GLOO_SOCKET_IFNAME"), socket.gethostname(), environ.get("MASTER_ADDR")
    if chosen:
        findings = [check_interface(chosen, interfaces, several_hosts)]
    else:
        findings = [check_host_name(host, own_address(host), interfaces, several_hosts)]
    if master:
        findings.append(check_master(master, resolve(master), environ.get("MASTER_PORT", "unset"), several_hosts))
    return findings


def resolve(name: str) -> list[str]:
    """Return the addresses of a name; an empty list if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def own_address(name: str) -> str | None:
    """Return the first address of a name to which this machine can bind, if there is one."""
    for address in resolve(name):
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
            return address
    return None


def check_interface(chosen: str, interfaces: Sequence[str], several_hosts: bool) -> Finding:
    """Check the interfaces in GLOO_SOCKET_IFNAME."""
    missing = [name for name in chosen.split(",") if name not in interfaces]
    if missing:
        found = f"GLOO_SOCKET_IFNAME={chosen}: this host has no interface {missing[0]}"
        return Finding(GLOO, "problem", found, "gloo cannot start.", f"Choose from: {', '.join(interfaces)}.")
    if several_hosts and all(name in LOOPBACKS for name in chosen.split(",")):
        found = f"GLOO_SOCKET_IFNAME={chosen} is the loopback"
        return Finding(GLOO, "problem", found, NOT_REACHABLE, _set_interface(interfaces))
    return Finding(GLOO, "ok", f"{chosen}, from GLOO_SOCKET_IFNAME")


def check_host_name(host: str, address: str | None, interfaces: Sequence[str], several_hosts: bool) -> Finding:
    """Check the address of this host to which its name resolves, if any: without GLOO_SOCKET_IFNAME, gloo announces it.

    Debian and Ubuntu write `127.0.1.1 myhost` into /etc/hosts. Then each worker finds only itself at this address.
    """
    if address is not None and not _is_loopback(address):
        return Finding(GLOO, "ok", f"the one with {address}, to which this host's name, {host}, resolves")
    found = f"this host's name, {host}, resolves to {address or 'no address of this host'}"
    way_out = f"{_set_interface(interfaces)} Or let {host} resolve to its real address in /etc/hosts."
    if several_hosts:
        return Finding(GLOO, "problem", found, f"gloo announces {address or 'the loopback'}. {NOT_REACHABLE}", way_out)
    return Finding(GLOO, "warning", found, f"This works on one host. {NOT_REACHABLE}", f"For several hosts: {way_out}")


def _set_interface(interfaces: Sequence[str]) -> str:
    outward = ", ".join(name for name in interfaces if name not in LOOPBACKS)
    return f"Set GLOO_SOCKET_IFNAME to the interface that joins the hosts ({outward or 'none here'})."


def check_master(name: str, addresses: Sequence[str], port: str, several_hosts: bool) -> Finding:
    """Check MASTER_ADDR and the addresses to which it resolves."""
    shown = f"MASTER_ADDR={name}" + ("" if name in addresses else f" ({', '.join(addresses) or 'cannot be resolved'})")
    if not addresses:
        way_out = "Use an address, or add the name to /etc/hosts on every host."
        return Finding("master address", "problem", shown, "This worker cannot find worker 0.", way_out)
    fine = not (several_hosts and _is_loopback(addresses[0]))
    why, way_out = "Each host looks for worker 0 on itself.", "Use an address of its host that the others can reach."
    return finding("master address", fine, f"{shown}, port {port}" if fine else shown, why, way_out)


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback


def open_files() -> int | None:
    """Return how many files this process may open; None without a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_files(limit: int | None, workers: int) -> Finding:
    """Check that each worker may open sockets to all others, for several process groups."""
    needed = max(LEAST_FILES, FILES_PER_WORKER * workers)
    shown = "no limit" if limit is None else f"at most {limit}"
    why = f"With {workers} workers, sockets and data loaders may need {needed}."
    way_out = f"Run ulimit -n {max(needed, 65536)} before the run."
    return finding("open files", limit is None or limit >= needed, shown, why, way_out, "warning")


def check_shared(total_bytes: int | None) -> Finding:
    """Check the size of /dev/shm. Docker's default is 64 MiB."""
    if total_bytes is None:
        return Finding("shared memory", "ok", "there is no /dev/shm here")
    shown = f"/dev/shm has {total_bytes / 2**20:,.0f} MiB"
    why = "Data loaders with workers, and NCCL, may fail with 'Bus error'."
    way_out = "Start the container with --shm-size=8g or --ipc=host."
    return finding("shared memory", total_bytes >= LEAST_SHARED_BYTES, shown, why, way_out, "warning")


def check_threads(environ: Mapping[str, str], local_workers: int, cores: int, quota: float | None) -> Finding:
    """Check that the workers of this host start no more threads than they have cores."""
    allowed = float(cores) if quota is None else min(float(cores), quota)
    text = environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdigit() and int(text) else cores
    shown = f"{local_workers} x {threads} threads on {allowed:g} cores" + ("" if text else ", OMP_NUM_THREADS is unset")
    shown += f", the container may use {quota:g} of {cores} cores" if quota is not None and quota < cores else ""
    if local_workers * threads > max(allowed, local_workers):
        why, way_out = "Threads that share a core slow every worker.", max(1, int(allowed // local_workers))
        return Finding("threads", "warning", shown, why, f"Set OMP_NUM_THREADS={way_out}.")
    why = "Workers that share a core slow each other, and each collective waits for the slowest."
    return finding("threads", local_workers <= allowed, shown, why, "Start fewer workers on this host.", "warning")


def cpu_quota(text: str) -> float | None:
    """Parse the content of cpu.max into cores; None without a quota.

    >>> cpu_quota("150000 100000"), cpu_quota("max 100000")
    (1.5, None)
    """
    quota, period = text.split()
    return None if quota == "max" else int(quota) / int(period)


# The training data.


def summarize(path: Path) -> dict[str, str]:
    """Count the files and bytes of a file or folder, and digest all names and sizes, and blocks of up to 256 files."""
    walked = os.walk(path, followlinks=True, onerror=_fail) if path.is_dir() else [("", [], [str(path)])]
    files = sorted(Path(folder, name) for folder, _, found in walked for name in found)
    sizes = [file.stat().st_size for file in files]
    listed, sampled = hashlib.sha256(), hashlib.sha256()
    for file, size in zip(files, sizes, strict=True):
        listed.update(f"{file.relative_to(path).as_posix()}\0{size}\0".encode())
    for file in files[:: max(1, -(-len(files) // SAMPLED_FILES))]:
        sampled.update(_blocks(file))
    return {
        "number of files": f"{len(files):,}",
        "total size": f"{sum(sizes):,} bytes",
        "file names and sizes": listed.hexdigest()[:16],
        "sampled bytes": sampled.hexdigest()[:16],
    }


def _fail(error: OSError) -> None:
    raise error


def _blocks(path: Path) -> bytes:
    """Read the first, the middle and the last block of a file."""
    blocks = b""
    with path.open("rb") as file:
        last = max(0, file.seek(0, os.SEEK_END) - BLOCK_BYTES)
        for start in (0, last // 2, last):
            file.seek(start)
            blocks += file.read(BLOCK_BYTES)
    return blocks


def check_data(path: Path) -> tuple[Finding, dict[str, str]]:
    """Check that there are files at the path; return their summary, too."""
    why = "This worker has nothing to train on."
    try:
        found = summarize(path)
    except OSError as error:
        shown = f"--data {path}: {error.strerror or error}: {error.filename or path}"
        return Finding("data", "problem", shown, why, "Give a file or folder that this host can read."), {}
    if found["number of files"] == "0":
        way_out = "Mount the disk on this host, or correct the path."
        return Finding("data", "problem", f"--data {path}: the folder has no files", why, way_out), found
    return Finding("data", "ok", f"{path}: {found['number of files']} files, {found['total size']}"), found


def compare_data(by_worker: Sequence[Mapping[str, str]]) -> Finding:
    """Check that the summaries of all workers are the same, and name what differs."""
    for part in dict.fromkeys(part for summary in by_worker for part in summary):
        _, odd = outliers([summary.get(part) for summary in by_worker])
        if odd:
            found = f"{names(odd)}: not the same {part} as on the other workers"
            why = "Samplers that split one data set between workers then skip or repeat samples."
            way_out = "Copy the data again, or mount the same disk. Ignore this if each worker has its own part."
            return Finding("same data", "problem", found, why, way_out)
    return Finding("same data", "ok", f"the same on all {len(by_worker)} workers: names, sizes and sampled bytes")
