"""Random kills and stops, whoever leads included: training goes on, and no committed round is lost or done twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass, field

import pytest
import torch

from tests.elastic.chaos import Crowd, Job, held, replay

SIX = ("0", "1", "2", "3", "4", "5")
LEAST = 2
RECOVER_S = 30


@dataclass
class Faults:
    """When faults were made, and how many of which kind."""

    at: list[float] = field(default_factory=list)
    kills: int = 0
    stops: int = 0
    leaders: int = 0
    """Faults of the first member: the one that hands its state to those who join."""
    zeros: int = 0

    def note(self, crowd: Crowd, victim: str, fault: signal.Signals) -> None:
        self.at.append(time.time())
        self.kills += fault == signal.SIGKILL
        self.stops += fault == signal.SIGSTOP
        self.leaders += crowd.members()[0] == victim
        self.zeros += victim == "0"


def chaos(crowd: Crowd, seconds: float, rng: random.Random) -> Faults:
    """Kill or stop a worker every 0.5 to 2 s, and start or wake it later: at a third of the times, whoever leads.

    Who holds the committed rounds must not die to the last, or they are lost with them: two holders are left alone.
    """
    faults = Faults()
    wake: dict[str, float] = {}
    again: dict[str, float] = {}
    until = time.monotonic() + seconds
    due = time.monotonic()
    while time.monotonic() < until:
        start_again(crowd, again, rng)
        for id in [id for id, at in wake.items() if at < time.monotonic()]:
            crowd.send(id, signal.SIGCONT)
            del wake[id]
        if time.monotonic() > due:
            leader = [crowd.members()[0]] if rng.random() < 1 / 3 else []
            victim = (leader + rng.sample(list(crowd.running), 1))[0]
            well = [id for id in crowd.holders() if id != victim]
            if victim not in wake and crowd.running[victim].exitcode is None and len(well) >= LEAST:
                fault = rng.choice([signal.SIGKILL, signal.SIGSTOP])
                faults.note(crowd, victim, fault)
                crowd.send(victim, fault)
                if fault == signal.SIGSTOP:
                    wake[victim] = time.monotonic() + rng.uniform(0.2, 4)
                due = time.monotonic() + rng.uniform(0.5, 2)
        time.sleep(0.1)
    for id in wake:
        crowd.send(id, signal.SIGCONT)
    return faults


def start_again(crowd: Crowd, again: dict[str, float], rng: random.Random) -> None:
    """Start workers that were killed, each after up to 3 s. None may have ended otherwise."""
    for id, process in list(crowd.running.items()):
        if process.exitcode is not None:
            assert process.exitcode == -signal.SIGKILL, crowd.tail()
            if again.setdefault(id, time.monotonic() + rng.uniform(0, 3)) < time.monotonic():
                crowd.start(id)
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
        timeout_s=2.0,
        silence_s=1.0,
        step_s=0.02,
        folder=str(folder),
        save_every=10,
    )
    with Crowd(job):  # a first one, for what the forkserver itself opens
        pass
    files, before = len(os.listdir("/proc/self/fd")), held()
    with Crowd(job) as crowd:
        port = crowd.job.port
        crowd.start(*ids)
        crowd.wait_for_step(10)
        rng = random.Random(seed)
        faults = chaos(crowd, seconds, rng)
        start_again(crowd, dict.fromkeys(ids, 0.0), rng)
        crowd.wait_for_members(*ids, timeout_s=RECOVER_S)
        crowd.end()
        assert {process.exitcode for process in crowd.everyone} == {0, -signal.SIGKILL}, crowd.tail()
        assert not crowd.errors(), crowd.tail()
        rounds, finals = crowd.commits(), crowd.finals()
        assert set(finals) == set(ids)
        expected = replay(rounds, momentum)
        for final in finals.values():
            assert torch.equal(torch.tensor(final["final"], dtype=torch.float64), expected)
        slowest = check_progress(faults, crowd)
        tried = len({tuple(line["tried"]) for line in crowd.lines() if "tried" in line})
    assert list((logs / "tmp").iterdir()) == []
    assert list(folder.rglob("*.tmp*")) == []
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0
    assert held() == before, "no process and no socket is left"
    assert len(os.listdir("/proc/self/fd")) == files
    sys.stdout.write(
        f"{len(ids)} workers, {plan}, {seconds} s: {faults.kills} killed, {faults.stops} stopped, of these the first "
        f"member {faults.leaders} and worker 0 {faults.zeros}; {rounds[-1][1]} steps committed of {tried} tried "
        f"({100 * rounds[-1][1] / tried:.1f}%); the longest wait for progress was {slowest:.1f} s\n"
    )


def check_progress(faults: Faults, crowd: Crowd) -> float:
    """See that a round was committed soon after each fault; return the longest time that it took."""
    assert len(faults.at) >= (faults.at[-1] - faults.at[0]) / 4
    assert min(faults.kills, faults.stops, faults.leaders, faults.zeros) > 0
    committed_s = sorted(line["at"] for line in crowd.lines() if "commit" in line)
    waits: list[float] = [min(each - at for each in committed_s if each > at) for at in faults.at]
    assert max(waits) < RECOVER_S, f"no progress for {max(waits):.1f} s"
    return max(waits)


@pytest.mark.slow
def test_a_minute_of_chaos(tmp_path):
    run_chaos(tmp_path, SIX[:5], seconds=60, seed=1)


@pytest.mark.nightly
def test_a_minute_of_chaos_among_four_that_average_weights(tmp_path):
    run_chaos(tmp_path, SIX[:4], seconds=60, seed=3, plan="post_local_sgd(period=4)", momentum=0.0)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_minutes_of_chaos(tmp_path):
    run_chaos(tmp_path, SIX, seconds=600, seed=2)
