"""Limits of this machine, or of the container: open files, shared memory, cores."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from laconic.doctor.finding import Finding, ok, warning

LEAST_FILES = 1024
FILES_PER_WORKER = 64  # sockets of a few process groups, pipes of data loaders, files of the run
LEAST_SHARED_BYTES = 2**30
SHARED_MEMORY = Path("/dev/shm")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroups v2


def check_limits(environ: Mapping[str, str], workers: int, local_workers: int, cores: int) -> list[Finding]:
    """Check all limits of this machine."""
    shared_bytes = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else None
    quota = cpu_quota(CPU_QUOTA.read_text()) if CPU_QUOTA.is_file() else None
    return [
        check_files(open_files(), workers),
        check_shared(shared_bytes),
        check_threads(environ, local_workers, cores, quota),
    ]


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
    if limit is None or limit >= needed:
        return ok("open files", "no limit" if limit is None else f"at most {limit}")
    why = f"With {workers} workers, sockets and data loaders may need {needed}."
    return warning("open files", f"at most {limit}", why, f"Run ulimit -n {max(needed, 65536)} before the run.")


def check_shared(total_bytes: int | None) -> Finding:
    """Check the size of /dev/shm. Docker's default is 64 MiB."""
    if total_bytes is None:
        return ok("shared memory", "there is no /dev/shm here")
    shown = f"/dev/shm has {total_bytes / 2**20:,.0f} MiB"
    if total_bytes >= LEAST_SHARED_BYTES:
        return ok("shared memory", shown)
    why = "Data loaders with workers, and NCCL, may fail with 'Bus error'."
    return warning("shared memory", shown, why, "Start the container with --shm-size=8g or --ipc=host.")


def check_threads(environ: Mapping[str, str], local_workers: int, cores: int, quota: float | None) -> Finding:
    """Check that the workers of this host start no more threads than they have cores."""
    allowed = float(cores) if quota is None else min(float(cores), quota)
    text = environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdigit() and int(text) else cores
    shown = f"{local_workers} x {threads} threads on {allowed:g} cores" + ("" if text else ", OMP_NUM_THREADS is unset")
    shown += f", the container may use {quota:g} of {cores} cores" if quota is not None and quota < cores else ""
    if local_workers * threads > max(allowed, local_workers):
        way_out = f"Set OMP_NUM_THREADS={max(1, int(allowed // local_workers))}."
        return warning("threads", shown, "Threads that share a core slow every worker.", way_out)
    if local_workers > allowed:
        why = "Workers that share a core slow each other, and each collective waits for the slowest."
        return warning("threads", shown, why, "Start fewer workers on this host.")
    return ok("threads", shown)


def cpu_quota(text: str) -> float | None:
    """Parse the content of cpu.max into cores; None without a quota.

    >>> cpu_quota("150000 100000"), cpu_quota("max 100000")
    (1.5, None)
    """
    quota, _, period = text.strip().partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None
