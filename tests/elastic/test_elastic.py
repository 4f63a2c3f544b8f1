"""Losing and gaining workers: real processes, killed and stopped, against a replay of the committed rounds."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import replace

import pytest
import torch

from tests.elastic.chaos import Crowd, Job, replay

FOUR = ("0", "1", "2", "3")


def job(tmp_path, **given):
    logs = tmp_path / "logs"
    (logs / "tmp").mkdir(parents=True)
    return Job(**{"port": 0, "logs": str(logs), "total": 40, "step_s": 0.02, **given})


def check_against_replay(crowd, ids):
    finals = crowd.finals()
    assert not crowd.errors(), crowd.tail()
    assert set(ids) <= set(finals)
    rounds = crowd.commits()
    expected = replay(rounds)
    for id in ids:
        assert finals[id]["step"] == rounds[-1][1] == len(rounds)
        assert torch.equal(torch.tensor(finals[id]["final"], dtype=torch.float64), expected), id


def test_without_faults_it_is_plain_training(tmp_path):
    with Crowd(job(tmp_path)) as crowd:
        crowd.start(*FOUR)
        crowd.wait(60)
        check_against_replay(crowd, FOUR)
        assert len(crowd.commits()) == 40
        assert {tuple(workers) for _, _, workers in crowd.commits()} == {FOUR}


@pytest.mark.parametrize("victim", ["0", pytest.param("2", marks=pytest.mark.nightly)])
def test_the_others_go_on_when_one_is_killed(tmp_path, victim):
    with Crowd(job(tmp_path)) as crowd:
        crowd.start(*FOUR)
        crowd.wait_for_step(10)
        time.sleep(random.Random(victim).random() * 0.05)
        crowd.send(victim, signal.SIGKILL)
        killed_at = time.time()
        rest = [id for id in FOUR if id != victim]
        crowd.wait(60, *rest)
        check_against_replay(crowd, rest)
        assert crowd.commits()[-1][2] == rest
        first = min(line["at"] for line in crowd.lines() if "commit" in line and line["commit"][2] == rest)
        assert first - killed_at < 15


def test_a_worker_that_stood_still_comes_back(tmp_path):
    with Crowd(job(tmp_path, total=10**6, timeout_s=1.5)) as crowd:
        crowd.start(*FOUR)
        crowd.wait_for_step(10)
        crowd.send("1", signal.SIGSTOP)
        crowd.wait_for_members("0", "2", "3", timeout_s=30)
        crowd.send("1", signal.SIGCONT)
        crowd.wait_for_members(*FOUR)
        crowd.end()
        check_against_replay(crowd, FOUR)


def test_late_and_returning_workers_are_let_in_after_a_round(tmp_path):
    with Crowd(job(tmp_path, total=10**6, expect=2)) as crowd:
        crowd.start("0", "2")
        crowd.wait_for_step(5)
        crowd.start("1")
        crowd.wait_for_members("0", "1", "2")
        crowd.send("0", signal.SIGKILL)
        crowd.wait_for_members("1", "2")
        crowd.start("0")  # with another state than it had: it takes over that of the others
        crowd.wait_for_members("0", "1", "2")
        crowd.end()
        check_against_replay(crowd, ["0", "1", "2"])
        assert crowd.commits()[0][2] == ["0", "2"]


def test_a_worker_that_is_back_at_once_does_not_take_the_others_back_to_what_its_disk_has(tmp_path):
    # It comes to the very meeting in which the others find it missing, with an older round of the same generation.
    given = {"folder": str(tmp_path / "saved"), "save_every": 7, "timeout_s": 1.5, "silence_s": 2.0}
    with Crowd(job(tmp_path, total=10**6, **given)) as crowd:
        crowd.start(*FOUR)
        for victim in ("1", "0", "3"):
            crowd.wait_for_step(crowd.newest() + 20)
            crowd.wait_for_members(*FOUR)
            crowd.send(victim, signal.SIGKILL)
            crowd.start(victim)
        crowd.wait_for_step(crowd.newest() + 20)
        crowd.wait_for_members(*FOUR)
        crowd.end()
        check_against_replay(crowd, FOUR)


@pytest.mark.parametrize("fault", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_all_stop_when_the_host_of_the_store_is_gone(tmp_path, fault):
    folder = tmp_path / "saved"
    with Crowd(job(tmp_path, total=10**6, folder=str(folder))) as crowd:
        crowd.start(*FOUR)
        crowd.wait_for_step(10)
        os.kill(crowd.host.pid or 0, fault)
        gone_at = time.time()
        crowd.wait(30)
        errors = crowd.errors()
        assert {id: line["error"] for id, line in errors.items()} == dict.fromkeys(FOUR, "StoreLostError")
        assert max(line["at"] for line in errors.values()) - gone_at < 10
        committed = crowd.commits()
    last = committed[-1][1]
    with Crowd(replace(crowd.job, total=last + 10)) as again:  # a new store; states are those on the disk
        again.start(*FOUR)
        again.wait(60)
        assert set(again.errors()) == set(FOUR) and len(again.finals()) == 4  # the errors are the first run's
        assert len(again.commits()) == last + 10
        expected = replay(again.commits())
        assert all(
            torch.equal(torch.tensor(f["final"], dtype=torch.float64), expected) for f in again.finals().values()
        )


def test_too_few_do_not_commit(tmp_path):
    with Crowd(job(tmp_path, total=10**6, least=3, wait_s=3.0)) as crowd:
        crowd.start(*FOUR)
        crowd.wait_for_step(10)
        crowd.send("0", signal.SIGKILL)
        crowd.wait_for_step(crowd.newest() + 5)
        crowd.send("3", signal.SIGKILL)
        crowd.wait(30, "1", "2")
        errors = crowd.errors()
        assert {errors[id]["error"] for id in ("1", "2")} == {"QuorumError"}
        assert "2 of at least 3 workers came within 3 s" in errors["1"]["text"]
        assert all(len(workers) >= 3 for _, _, workers in crowd.commits())


def test_all_stop_together_when_one_is_asked_to(tmp_path):
    with Crowd(job(tmp_path, total=10**6)) as crowd:
        crowd.start("0", "1", "2")
        crowd.start("3", stop_at=17)
        crowd.wait(60)
        assert {(f["step"], f["stopped"]) for f in crowd.finals().values()} == {(17, True)}
        expected = replay(crowd.commits())
        assert all(
            torch.equal(torch.tensor(f["final"], dtype=torch.float64), expected) for f in crowd.finals().values()
        )


def test_whoever_comes_after_the_end_is_told_so(tmp_path):
    with Crowd(job(tmp_path, total=5, expect=2)) as crowd:
        crowd.start("0", "1")
        crowd.wait(60)
        crowd.start("2")
        crowd.wait(30, "2")
        assert crowd.errors()["2"]["error"] == "EndedError" and "without worker '2'" in crowd.errors()["2"]["text"]


def test_a_second_process_takes_over_an_id(tmp_path):
    with Crowd(job(tmp_path, total=10**6, expect=3)) as crowd:
        crowd.start("0", "1", "2")
        crowd.wait_for_step(5)
        first = crowd.running["1"]
        crowd.start("1")
        first.join(30)
        assert not first.is_alive() and crowd.errors()["1"]["error"] == "ReplacedError"
        crowd.wait_for_step(crowd.newest() + 5)
        crowd.wait_for_members("0", "1", "2")
        crowd.end()
        expected = replay(crowd.commits())
        finals = crowd.finals()
        assert set(finals) == {"0", "1", "2"}
        assert all(torch.equal(torch.tensor(f["final"], dtype=torch.float64), expected) for f in finals.values())


@pytest.mark.parametrize(
    "plan",
    [
        "diloco(period=4)",
        *(
            pytest.param(text, marks=pytest.mark.nightly)
            for text in ("post_local_sgd(period=4)", "power_sgd(rank=1)", "streaming_diloco(period=8, fragments=2)")
        ),
    ],
)
def test_every_method_survives_a_loss_and_a_return(tmp_path, plan):
    with Crowd(job(tmp_path, total=160, plan=plan, step_s=0.02)) as crowd:
        crowd.start(*FOUR)
        crowd.wait_for_step(12)
        crowd.send("0", signal.SIGKILL)
        crowd.wait_for_step(crowd.newest() + 12)
        crowd.start("0")
        crowd.wait(90)
        finals, errors = crowd.finals(), crowd.errors()
        assert not errors, crowd.tail()
        assert {f["step"] for f in finals.values()} == {160} and len({str(f["final"]) for f in finals.values()}) == 1
        crowd.commits()


@pytest.mark.slow
def test_with_a_fault_every_5_5_steps_at_least_82_percent_of_steps_commit(tmp_path):
    rng = random.Random(5)
    at, faults = 3.0, []
    while at < 66:
        faults.append(int(at))
        at += rng.expovariate(1 / 5.5)
    with Crowd(job(tmp_path, total=66, faults=tuple(faults), silence_s=0.8, step_s=0.1)) as crowd:
        crowd.start(*FOUR)
        until = time.monotonic() + 150
        while len(crowd.finals()) < 4 and time.monotonic() < until:
            for id in FOUR:
                if crowd.running[id].exitcode == -signal.SIGKILL:
                    crowd.start(id)
            if any(process.exitcode == 0 for process in crowd.running.values()):
                break
            time.sleep(0.05)
        crowd.wait(60, *(id for id in FOUR if crowd.running[id].exitcode != -signal.SIGKILL))
        assert len(list((tmp_path / "logs").glob("fault-*"))) == len(set(faults))
        rounds = crowd.commits()
        expected = replay(rounds)
        finals = crowd.finals()
        assert finals and all(
            torch.equal(torch.tensor(f["final"], dtype=torch.float64), expected) for f in finals.values()
        )
        tried = {tuple(line["tried"]) for line in crowd.lines() if "tried" in line}
        assert len(rounds) == 66
        assert 66 / len(tried) >= 0.82, (len(tried), faults)
