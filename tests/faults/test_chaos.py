"""Random kills and stops, worker 0 included: training goes on, and no committed round is lost or done twice."""

from __future__ import annotations

import os
import random
import signal
import socket
import time

import pytest
import torch

from tests.faults.chaos import Crowd, Job, replay

FIVE = ("0", "1", "2", "3", "4")
LEAST = 2
RECOVER_S = 30


def chaos(crowd, seconds, rng):
    """Kill or stop a random worker every 0.5 to 2 s, and start or wake it later. Returns when faults were made.

    Who holds the committed rounds must not die to the last, or they are lost with them: two members are left alone.
    """
    faults: list[float] = []
    wake: dict[str, float] = {}
    again: dict[str, float] = {}
    until = time.monotonic() + seconds
    due = time.monotonic()
    while time.monotonic() < until:
        for id in FIVE:
            if crowd.running[id].exitcode is not None:
                assert crowd.running[id].exitcode == -signal.SIGKILL, crowd.tail()
                if again.setdefault(id, time.monotonic() + rng.uniform(0, 3)) < time.monotonic():
                    crowd.start(id)
                    del again[id]
        for id in [id for id, at in wake.items() if at < time.monotonic()]:
            crowd.send(id, signal.SIGCONT)
            del wake[id]
        if time.monotonic() > due:
            victim = rng.choice(FIVE)
            well = [id for id in crowd.members() if id != victim and id not in {**wake, **again}]
            if victim not in wake and crowd.running[victim].exitcode is None and len(well) >= LEAST:
                fault = rng.choice([signal.SIGKILL, signal.SIGSTOP])
                crowd.send(victim, fault)
                faults.append(time.time())
                if fault == signal.SIGSTOP:
                    wake[victim] = time.monotonic() + rng.uniform(0.2, 4)
            due = time.monotonic() + rng.uniform(0.5, 2)
        time.sleep(0.1)
    for id in wake:
        crowd.send(id, signal.SIGCONT)
    return faults


def run_chaos(tmp_path, seconds, seed):
    logs = tmp_path / "logs"
    (logs / "tmp").mkdir(parents=True)
    job = Job(0, str(logs), total=10**9, least=LEAST, expect=5, patience_s=2.0, silence_s=1.0, step_s=0.02)
    with Crowd(job):  # a first one, for what the forkserver itself opens
        pass
    files = len(os.listdir("/proc/self/fd"))
    with Crowd(job) as crowd:
        port = crowd.job.port
        crowd.start(*FIVE)
        crowd.wait_for_step(10)
        faults = chaos(crowd, seconds, random.Random(seed))
        crowd.wait_for_step(crowd.newest() + 10, RECOVER_S)
        job.end.touch()
        until = time.monotonic() + 60
        while not crowd.finals() and time.monotonic() < until:
            time.sleep(0.1)
        members = next(iter(crowd.finals().values()))["members"]
        crowd.wait(30, *members)
        rounds, lines = crowd.commits(), crowd.lines()
        finals = crowd.finals()
        assert set(members) <= set(finals), crowd.tail()
        expected = replay(rounds)
        for final in finals.values():
            assert torch.equal(torch.tensor(final["final"], dtype=torch.float64), expected)
        assert len(faults) >= seconds / 4
        committed_s = sorted(line["at"] for line in lines if "commit" in line)
        for at in faults:
            assert any(at < each < at + RECOVER_S for each in committed_s), f"no progress within {RECOVER_S} s of {at}"
    assert list((logs / "tmp").iterdir()) == []
    with socket.socket() as s:
        assert s.connect_ex(("127.0.0.1", port)) != 0
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.slow
def test_half_a_minute_of_chaos(tmp_path):
    run_chaos(tmp_path, seconds=25, seed=1)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ten_minutes_of_chaos(tmp_path):
    run_chaos(tmp_path, seconds=600, seed=2)
