"""Running processes and existing network namespaces, from /proc."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def process_table() -> Iterator[tuple[int, int]]:
    """(id, parent's id) of every process that is not a zombie."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                yield int(entry.name), int(parent)


def descendants(pid: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for process, parent in process_table():
        children.setdefault(parent, []).append(process)
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        fresh = children.get(waiting.pop(), [])
        found.update(fresh)
        waiting.extend(fresh)
    return found


def running(pids: set[int]) -> set[int]:
    return pids & {pid for pid, _ in process_table()}


def namespaces_held_by(pids: set[int]) -> set[str]:
    """The network namespaces that these processes are in or hold open, without our own."""
    links = [Path("/proc", str(pid), "ns", "net") for pid in pids]
    for pid in pids:
        try:
            links += list(Path("/proc", str(pid), "fd").iterdir())
        except OSError:
            continue
    names = set()
    for link in links:
        try:
            names.add(os.readlink(link))
        except OSError:
            continue
    return {name for name in names if name.startswith("net:[")} - {os.readlink("/proc/self/ns/net")}


def namespaces_alive(names: set[str]) -> set[str]:
    """Those of the namespaces that any process holds, or that are mounted in the file system."""
    mounted = {line.split()[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    return names & (namespaces_held_by({pid for pid, _ in process_table()}) | mounted)


def eventually(true: Callable[[], object], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False
