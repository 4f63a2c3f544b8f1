"""Random kills and stops, also of the host of the store: training continues, and no commit is lost or made twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import pytest

import laconic
from laconic.cost import facts_of
from tests.elastic import read_history
from tests.elastic.cluster import Cluster, Job
from tests.elastic.replay import Line
from tests.elastic.test_samples import check_ledgers

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
    down: list[tuple[float, float]] = field(default_factory=list)
    """From when to when there was no store: its host was killed, and started again when all workers had stopped."""

    def add(self, cluster: Cluster, victim: str, fault: signal.Signals) -> None:
        self.at.append(time.time())
        self.kills += fault == signal.SIGKILL
        self.stops += fault == signal.SIGSTOP
        self.sources += cluster.members()[0] == victim
        self.zeros += victim == "0"


def inject(cluster: Cluster, seconds: float, rng: random.Random, hosts: int) -> Faults:
    """Kill or stop a worker every 0.5 to 2 s, a third of the times the first member; start or continue it later.

    If all workers that hold the last commit died, it would be lost: `least` of them are left alone. The host of the
    store is killed `hosts` times, and started again with all workers when these have stopped.
    """
    faults = Faults()
    wake: dict[str, float] = {}
    again: dict[str, float] = {}
    until = time.monotonic() + seconds
    due = time.monotonic()
    host_due = [due + seconds * (n + rng.random()) / (hosts + 1) for n in range(1, hosts + 1)]
    while time.monotonic() < until or host_due:
        if host_due and time.monotonic() > host_due[0]:
            del host_due[0]
            restart_all(cluster, faults)
            wake, again, due = {}, {}, time.monotonic() + rng.uniform(0.5, 4)
        restart_killed(cluster, again, rng)
        for id in [id for id, at in wake.items() if at < time.monotonic()]:
            cluster.send(id, signal.SIGCONT)
            del wake[id]
        if time.monotonic() > due:
            first = [cluster.members()[0]] if rng.random() < 1 / 3 else []
            victim = (first + rng.sample(list(cluster.running), 1))[0]
            well = [id for id in cluster.holders() if id != victim]
            if victim not in wake and cluster.running[victim].exitcode is None and len(well) >= cluster.job.least:
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


def restart_all(cluster: Cluster, faults: Faults) -> None:
    """Kill the host of the store. All workers stop; a new store and all of them start, and commit a step."""
    killed_s = time.time()
    cluster.kill_host()
    codes = {id: process.exitcode for id, process in cluster.running.items()}
    assert set(codes.values()) <= {1, -signal.SIGKILL}, (codes, cluster.tail())
    newest = cluster.newest()
    cluster.host_store()
    faults.down.append((killed_s, time.time()))
    cluster.start(*cluster.running)
    cluster.wait_for_step(newest + 1)


def restart_killed(cluster: Cluster, again: dict[str, float], rng: random.Random) -> None:
    """Start workers that were killed, each after up to 3 s. No worker may have ended otherwise."""
    for id, process in list(cluster.running.items()):
        if process.exitcode is not None:
            assert process.exitcode == -signal.SIGKILL, cluster.tail()
            if again.setdefault(id, time.monotonic() + rng.uniform(0, 3)) < time.monotonic():
                cluster.start(id)
                del again[id]


def run_chaos(tmp_path, ids, seconds, seed, plan="ddp()", momentum=0.5, hosts=0, conserves=True, samples=97):
    logs, folder = tmp_path / "logs", tmp_path / "saved"
    (logs / "tmp").mkdir(parents=True)
    job = Job(
        port=0,
        logs=str(logs),
        total=10**9,
        plan=plan,
        momentum=momentum,
        # Above half: with a new store, fewer could go on from older disks before the others have come.
        least=len(ids) // 2 + 1 if hosts else LEAST,
        expect=len(ids),
        heartbeat_timeout_s=1.0,
        step_s=0.02,
        folder=str(folder),
        save_every=10,
        samples=samples,
    )
    with Cluster(job):  # the forkserver starts, and opens its files
        pass
    files = len(os.listdir("/proc/self/fd"))
    with Cluster(job) as cluster:
        port = cluster.job.port
        cluster.start(*ids)
        cluster.wait_for_step(10)
        rng = random.Random(seed)
        faults = inject(cluster, seconds, rng, hosts)
        restart_killed(cluster, dict.fromkeys(ids, 0.0), rng)
        cluster.wait_for_step(cluster.newest() + 1, timeout_s=RECOVER_S)
        cluster.wait_for_members(*ids, timeout_s=RECOVER_S)
        cluster.end()
        expected = {0, -signal.SIGKILL} | ({1} if hosts else set())
        assert {process.exitcode for process in cluster.started} == expected, cluster.tail()
        assert {line["error"] for line in cluster.errors().values()} <= {"StoreLostError"}, cluster.tail()
        assert set(cluster.finals()) == set(ids) and len(faults.down) == hosts
        # What a target of bytes becomes: workers attach alone.
        schedule = laconic.plan(plan).resolved(facts_of(Line(1.0), 1, optimizers=("sgd",))).schedule
        history = cluster.history(repeat=schedule.period + getattr(schedule, "delay", 0), conserves=conserves)
        if laconic.plan(plan).codec == laconic.Exact() and not isinstance(schedule, laconic.Streaming):
            cluster.check_finals(*ids, momentum=momentum)
        assert check_ledgers(cluster, history) == len(ids)
        assert history.again > 0 or seconds < 30, "a fault undoes the step in which it comes"
        assert history.lost <= samples_of_a_period(schedule, len(ids))
        steps, slowest = cluster.newest(), check_progress(faults, cluster)
        tried = len({tuple(line["tried"]) for line in cluster.lines() if "tried" in line})
    assert list((logs / "tmp").iterdir()) == []
    assert list(folder.rglob("*.tmp*")) == []
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0
    assert len(os.listdir("/proc/self/fd")) == files
    sys.stdout.write(
        f"{len(ids)} workers, {plan}, {seconds} s: {faults.kills} killed, {faults.stops} stopped, of these the first "
        f"member {faults.sources} and worker 0 {faults.zeros}; {len(faults.down)} hosts of the store; {steps} steps "
        f"committed of {tried} tried ({100 * steps / tried:.1f}%), {history.repeated} repeated at most; "
        f"{history.compared} of {len(history.commits)} commits compared with their moves; the longest time without a "
        f"commit after a fault was {slowest:.1f} s\n{read_history.samples(history)}\n"
    )


def samples_of_a_period(schedule, workers):
    """What may have been tried after the last commit, by all workers: no later step draws it again."""
    return (schedule.period + getattr(schedule, "delay", 0)) * 3 * workers


def check_progress(faults: Faults, cluster: Cluster) -> float:
    """Check that a step was committed after each fault; return the longest time that it took, while there is a store.

    Without one, a worker that is about to join looks for it for up to a minute before the test starts it again.
    """
    if faults.at[-1] - faults.at[0] > 30:
        assert len(faults.at) >= (faults.at[-1] - faults.at[0]) / (8 if faults.down else 4)
        assert min(faults.kills, faults.stops, faults.sources, faults.zeros) > 0
    committed_s = sorted(line["at"] for line in cluster.lines() if "commit" in line)
    waits: list[float] = []
    for at in faults.at:
        committed = min(each for each in committed_s if each > at)
        without = sum(min(up, committed) - down for down, up in faults.down if at < down < committed)
        waits.append(committed - at - without)
    assert max(waits) < RECOVER_S, f"no commit for {max(waits):.1f} s"
    return max(waits)


@pytest.mark.slow
def test_some_seconds_of_chaos_with_a_fragment_always_in_flight(tmp_path):
    run_chaos(tmp_path, SIX[:4], seconds=10, seed=4, plan="streaming_diloco(period=2, fragments=2)", momentum=0.0)


@pytest.mark.nightly
def test_a_minute_of_chaos(tmp_path):
    run_chaos(tmp_path, SIX[:5], seconds=60, seed=1, conserves=False)  # momentum moves more than its gradient


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("plan", "conserves"),
    [
        ("streaming_diloco(period=4, fragments=4, delay=0)", True),
        ("streaming_diloco(period=2, fragments=2)", True),
        ("quantized_ddp()", True),
        ("sparse_loco()", False),  # its residuals decay
        ("streaming_diloco(period=8)", True),
        ("post_local_sgd(period=4)", True),
    ],
)
def test_a_minute_of_chaos_in_which_the_host_of_the_store_dies_twice(tmp_path, plan, conserves):
    run_chaos(tmp_path, SIX[:4], seconds=60, seed=3, plan=plan, momentum=0.0, hosts=2, conserves=conserves)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("plan", ["ddp()", "streaming_diloco(period=2, fragments=2)"])
def test_ten_minutes_of_chaos(tmp_path, plan):
    exact = plan == "ddp()"
    given = {"momentum": 0.5, "conserves": False} if exact else {"momentum": 0.0, "hosts": 10}
    run_chaos(tmp_path, SIX, seconds=600, seed=2, plan=plan, **given)
