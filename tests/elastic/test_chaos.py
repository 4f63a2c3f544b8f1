"""Random kills and stops: training continues, and no commit is lost or made twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import pytest

from tests.elastic.cluster import Cluster, Job

SIX = ("0", "1", "2", "3", "4", "5")
LEAST = 2
RECOVER_S = 30


@dataclass
class Faults:
    """When faults were injected, and how many of each kind."""

    at: list[float] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
    sources: int = 0
    """Faults of the first member: the one that sends its state to workers that join."""
    zeros: int = 0

    def add(self, cluster: Cluster, victim: str, fault: signal.Signals) -> None:
        self.at.append(time.time())
        self.kills += fault == signal.SIGKILL
        self.stops += fault == signal.SIGSTOP
        self.sources += cluster.members()[0] == victim
        self.zeros += victim == "0"


def inject(cluster: Cluster, seconds: float, rng: random.Random) -> Faults:
    """Kill or stop a worker every 0.5 to 2 s, a third of the times the first member; start or continue it later.

    If all workers that hold the last commit died, it would be lost: two of them are always left alone.
    """
    faults = Faults()
    wake: dict[str, float] = {}
    again: dict[str, float] = {}
    until = time.monotonic() + seconds
    due = time.monotonic()
    while time.monotonic() < until:
        restart_killed(cluster, again, rng)
        for id in [id for id, at in wake.items() if at < time.monotonic()]:
            cluster.send(id, signal.SIGCONT)
            del wake[id]
        if time.monotonic() > due:
            first = [cluster.members()[0]] if rng.random() < 1 / 3 else []
            victim = (first + rng.sample(list(cluster.running), 1))[0]
            well = [id for id in cluster.holders() if id != victim]
            if victim not in wake and cluster.running[victim].exitcode is None and len(well) >= LEAST:
                fault = rng.choice([signal.SIGKILL, signal.SIGSTOP])
                faults.add(cluster, victim, fault)
                cluster.send(victim, fault)
                if fault == signal.SIGSTOP:
                    wake[victim] = time.monotonic() + rng.uniform(0.2, 4)
                due = time.monotonic() + rng.uniform(0.5, 2)
        time.sleep(0.1)
    for id in wake:
        cluster.send(id, signal.SIGCONT)
    return faults


def restart_killed(cluster: Cluster, again: dict[str, float], rng: random.Random) -> None:
    """Start workers that were killed, each after up to 3 s. No worker may have ended otherwise."""
    for id, process in list(cluster.running.items()):
        if process.exitcode is not None:
            assert process.exitcode == -signal.SIGKILL, cluster.tail()
            if again.setdefault(id, time.monotonic() + rng.uniform(0, 3)) < time.monotonic():
                cluster.start(id)
                del again[id]


def run_chaos(tmp_path, ids, seconds, seed, plan="ddp()", momentum=0.5):
    logs, folder = tmp_path / "logs", tmp_path / "saved"
    (logs / "tmp").mkdir(parents=True)
    job = Job(
        port=0,
        logs=str(logs),
        total=10**9,
        plan=plan,
        momentum=momentum,
        least=LEAST,
        expect=len(ids),
        heartbeat_timeout_s=1.0,
        step_s=0.02,
        folder=str(folder),
        save_every=10,
    )
    with Cluster(job):  # the forkserver starts, and opens its files
        pass
    files = len(os.listdir("/proc/self/fd"))
    with Cluster(job) as cluster:
        port = cluster.job.port
        cluster.start(*ids)
        cluster.wait_for_step(10)
        rng = random.Random(seed)
        faults = inject(cluster, seconds, rng)
        restart_killed(cluster, dict.fromkeys(ids, 0.0), rng)
        cluster.wait_for_members(*ids, timeout_s=RECOVER_S)
        cluster.end()
        assert {process.exitcode for process in cluster.started} == {0, -signal.SIGKILL}, cluster.tail()
        assert not cluster.errors(), cluster.tail()
        assert set(cluster.finals()) == set(ids)
        cluster.check_finals(*ids, momentum=momentum)
        steps, slowest = cluster.newest(), check_progress(faults, cluster)
        tried = len({tuple(line["tried"]) for line in cluster.lines() if "tried" in line})
    assert list((logs / "tmp").iterdir()) == []
    assert list(folder.rglob("*.tmp*")) == []
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0
    assert len(os.listdir("/proc/self/fd")) == files
    sys.stdout.write(
        f"{len(ids)} workers, {plan}, {seconds} s: {faults.kills} killed, {faults.stops} stopped, of these the first "
        f"member {faults.sources} and worker 0 {faults.zeros}; {steps} steps committed of {tried} tried "
        f"({100 * steps / tried:.1f}%); the longest time without a commit after a fault was {slowest:.1f} s\n"
    )


def check_progress(faults: Faults, cluster: Cluster) -> float:
    """Check that a step was committed after each fault; return the longest time that it took."""
    assert len(faults.at) >= (faults.at[-1] - faults.at[0]) / 4
    assert min(faults.kills, faults.stops, faults.sources, faults.zeros) > 0
    committed_s = sorted(line["at"] for line in cluster.lines() if "commit" in line)
    waits: list[float] = [min(each - at for each in committed_s if each > at) for at in faults.at]
    assert max(waits) < RECOVER_S, f"no commit for {max(waits):.1f} s"
    return max(waits)


@pytest.mark.nightly
def test_a_minute_of_chaos(tmp_path):
    run_chaos(tmp_path, SIX[:5], seconds=60, seed=1)


@pytest.mark.nightly
def test_a_minute_of_chaos_among_four_that_average_weights(tmp_path):
    run_chaos(tmp_path, SIX[:4], seconds=60, seed=3, plan="post_local_sgd(period=4)", momentum=0.0)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_minutes_of_chaos(tmp_path):
    run_chaos(tmp_path, SIX, seconds=600, seed=2)
