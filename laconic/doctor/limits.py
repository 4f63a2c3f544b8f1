"""What this machine, or the container around us, allows: files, memory, shared memory, cores."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from laconic.doctor.finding import Finding, ok, warning

GIB, MIB = 2**30, 2**20
FILES_AT_LEAST = 1024
FILES_A_WORKER = 64  # sockets of a few process groups, pipes of data loaders, the run's own files
SHARED_AT_LEAST = GIB
MEMORY_AT_LEAST = GIB
UNLIMITED = 2**60  # cgroups write "no limit" as a number above this, or as "max"


def check_limits(environ: Mapping[str, str], workers: int, local_workers: int, cores: int) -> list[Finding]:
    """All limits of this machine."""
    root = Path("/")
    return [
        check_files(open_files(), workers),
        check_memory(root),
        check_shared(root),
        check_threads(environ, local_workers, cores, cgroup_cores(root)),
    ]


def open_files() -> int | None:
    """How many files this process may have open, if there is a limit."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def check_files(limit: int | None, workers: int) -> Finding:
    """Whether each worker may open a socket to every other, several times over."""
    needed = max(FILES_AT_LEAST, FILES_A_WORKER * workers)
    if limit is None or limit >= needed:
        return ok("open files", "no limit" if limit is None else f"{limit} at most")
    return warning(
        "open files",
        f"{limit} at most, and {workers} workers may need {needed}",
        f"Raise it before the run: ulimit -n {max(needed, 65536)}.",
    )


def check_memory(root: Path) -> Finding:
    """How much memory there is, and whether a container holds us to less."""
    available = _meminfo(root).get("MemAvailable")
    limit = cgroup_memory(root)
    if available is None:
        return ok("memory", "unknown: there is no /proc/meminfo here")
    shown = f"{available / GIB:.1f} GiB available"
    if limit is not None:
        shown += f", and this container may use {limit / GIB:.1f} GiB"
    if min(available, available if limit is None else limit) < MEMORY_AT_LEAST:
        return warning("memory", shown, "A worker whose memory ends is killed without a word. Free some, or use less.")
    return ok("memory", shown)


def check_shared(root: Path) -> Finding:
    """Docker gives 64 MiB of shared memory by default, and a data loader's workers die of it with "Bus error"."""
    place = root / "dev/shm"
    if not place.is_dir():
        return ok("shared memory", "there is no /dev/shm here")
    total = shutil.disk_usage(place).total
    shown = f"/dev/shm holds {total / MIB:,.0f} MiB"
    if total < SHARED_AT_LEAST:
        return warning(
            "shared memory",
            shown,
            "Data loaders with workers, and NCCL, may fail with 'Bus error'. Give the container --shm-size=8g or "
            "--ipc=host.",
        )
    return ok("shared memory", shown)


def check_threads(environ: Mapping[str, str], local_workers: int, cores: int, quota: float | None) -> Finding:
    """Whether the workers of this host start more threads than there are cores for them."""
    allowed = min(float(cores), quota) if quota is not None else float(cores)
    text = environ.get("OMP_NUM_THREADS", "")
    threads = int(text) if text.isdigit() and int(text) else cores
    each = max(1, int(allowed // local_workers))
    shown = f"{local_workers} x {threads} threads on {allowed:g} cores" + (
        "" if text else " (OMP_NUM_THREADS is unset)"
    )
    if quota is not None and quota < cores:
        shown += f"; the container's quota is {quota:g} of {cores}"
    if local_workers * threads > max(allowed, local_workers):
        return warning("threads", shown, f"Threads that take turns slow every worker. Set OMP_NUM_THREADS={each}.")
    if local_workers > allowed:
        return warning("threads", shown, "More workers than cores take turns, and each round waits for the slowest.")
    return ok("threads", shown)


def cgroup_memory(root: Path) -> int | None:
    """The container's limit of memory in bytes, of either version of cgroups."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        text = _text(root / "sys/fs/cgroup" / name)
        if text.isdigit() and int(text) < UNLIMITED:
            return int(text)
    return None


def cgroup_cores(root: Path) -> float | None:
    """How many cores' time the container may use."""
    base = root / "sys/fs/cgroup"
    words = _text(base / "cpu.max").split() or [
        _text(base / "cpu/cpu.cfs_quota_us"),
        _text(base / "cpu/cpu.cfs_period_us"),
    ]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
