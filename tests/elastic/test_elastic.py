"""Losing and gaining workers: real processes, killed and stopped, compared with a replay of the commits."""

from __future__ import annotations

import os
import random
import re
import signal
from dataclasses import replace

import pytest

from tests.elastic.cluster import Cluster, Job

FOUR = ("0", "1", "2", "3")


def job(tmp_path, **given):
    logs = tmp_path / "logs"
    (logs / "tmp").mkdir(parents=True)
    return Job(**{"port": 0, "logs": str(logs), "total": 10**6, "step_s": 0.02, **given})


def check_against_replay(cluster, *ids):
    """No worker failed, every commit has one step, and the weights are those of the replay."""
    assert not cluster.errors(), cluster.tail()
    cluster.check_finals(*ids)
    assert cluster.commits()[-1][1] == len(cluster.commits())


@pytest.mark.slow
def test_without_faults_it_is_plain_training(tmp_path):
    with Cluster(job(tmp_path, total=40)) as cluster:
        cluster.start(*FOUR)
        cluster.wait(60)
        check_against_replay(cluster, *FOUR)
        assert len(cluster.commits()) == 40
        assert {tuple(workers) for _, _, workers in cluster.commits()} == {FOUR}


@pytest.mark.parametrize("weighted", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_killed_and_late_workers_join_the_others(tmp_path, weighted):
    with Cluster(job(tmp_path, expect=2, weighted=weighted)) as cluster:
        cluster.start("0", "2")
        cluster.wait_for_step(5)
        cluster.start("1")
        cluster.wait_for_members("0", "1", "2")
        cluster.send("0", signal.SIGKILL)  # the one that would send its state to others
        cluster.wait_for_members("1", "2")
        cluster.start("0")  # with other weights: it receives those of the others
        cluster.wait_for_members("0", "1", "2")
        cluster.end()
        check_against_replay(cluster, "0", "1", "2")
        assert cluster.commits()[0][2] == ["0", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "2"])
def test_the_others_continue_when_one_is_killed(tmp_path, victim):
    with Cluster(job(tmp_path, total=40)) as cluster:
        cluster.start(*FOUR)
        cluster.wait_for_step(10)
        cluster.send(victim, signal.SIGKILL)
        rest = [id for id in FOUR if id != victim]
        cluster.wait(60, *rest)
        check_against_replay(cluster, *rest)
        assert cluster.commits()[-1][2] == rest


@pytest.mark.slow
def test_a_stopped_worker_comes_back(tmp_path):
    with Cluster(job(tmp_path, expect=3)) as cluster:
        cluster.start("0", "1", "2")
        cluster.wait_for_step(5)
        cluster.send("1", signal.SIGSTOP)
        cluster.wait_for_members("0", "2")
        cluster.send("1", signal.SIGCONT)
        cluster.wait_for_members("0", "1", "2")
        cluster.end()
        check_against_replay(cluster, "0", "1", "2")
        logged = cluster.warnings("0")
        for words in (
            r"a worker was lost after step \d+; the run goes on: the others form a new group\.",
            r"worker 1 is gone; workers 0, 2 go on after step \d+, 2 in all\.",
            r"worker 1 is back; workers 0, 1, 2 go on after step \d+, 3 in all\.",
        ):
            assert any(re.fullmatch(words, text) for text in logged), logged
        assert not any("checkpoint" in text or "Error" in text for text in logged), logged


def test_a_worker_leaves_and_the_others_continue(tmp_path):
    with Cluster(job(tmp_path, expect=3, total=12)) as cluster:
        cluster.start("0", "2")
        cluster.start("1", leave_at=6)
        cluster.wait(60)
        check_against_replay(cluster, "0", "2")
        left = cluster.finals()["1"]
        assert left["stopped"] and left["step"] in (5, 6)
        assert cluster.commits()[-1] == (11, 12, ["0", "2"])


@pytest.mark.nightly
def test_a_worker_that_restarts_at_once_does_not_take_the_others_back_to_what_it_saved(tmp_path):
    # It comes to the same rendezvous as the workers that lost it, with an older step of the same generation.
    given = {"folder": str(tmp_path / "saved"), "save_every": 7, "timeout_s": 1.5, "heartbeat_timeout_s": 2.0}
    with Cluster(job(tmp_path, **given)) as cluster:
        cluster.start(*FOUR)
        for victim in ("1", "0", "3"):
            cluster.wait_for_step(cluster.newest() + 20)
            cluster.wait_for_members(*FOUR)
            cluster.send(victim, signal.SIGKILL)
            cluster.start(victim)
        cluster.wait_for_step(cluster.newest() + 20)
        cluster.wait_for_members(*FOUR)
        cluster.end()
        check_against_replay(cluster, *FOUR)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ("ddp()", signal.SIGKILL),
        ("streaming_diloco(period=2, fragments=2)", signal.SIGKILL),
        ("streaming_diloco(period=2, fragments=2)", signal.SIGSTOP),
    ],
)
def test_all_stop_when_the_host_of_the_store_is_gone_and_continue_from_their_folder(tmp_path, plan, fault):
    with Cluster(job(tmp_path, plan=plan, momentum=0.0, folder=str(tmp_path / "saved"))) as cluster:
        cluster.start(*FOUR)
        cluster.wait_for_step(10)
        os.kill(cluster.host.pid or 0, fault)
        cluster.wait(30)
        errors = cluster.errors()
        assert {id: line["error"] for id, line in errors.items()} == dict.fromkeys(FOUR, "StoreLostError")
        last = cluster.commits()[-1][1]
        of_all = [line["id"] for line in cluster.lines() if line.get("commit", [0, 0])[1] == last]
        assert set(of_all) == set(FOUR), "all stop at the same commit"
    with Cluster(replace(cluster.job, port=0, total=last + 10)) as again:  # a new store, and the states on the disk
        again.start(*FOUR)
        again.wait(60)
        assert set(again.errors()) == set(FOUR) and len(again.finals()) == 4  # the errors are those of the first run
        assert again.newest() == last + 10
        again.history(repeat=3, conserves=True)
        if plan == "ddp()":
            again.check_finals(*FOUR, momentum=0.0)


@pytest.mark.slow
def test_too_few_workers_do_not_commit(tmp_path):
    with Cluster(job(tmp_path, least=3, expect=3, wait_s=3.0)) as cluster:
        cluster.start("0", "1", "2")
        cluster.wait_for_step(5)
        cluster.send("0", signal.SIGKILL)
        cluster.wait(30, "1", "2")
        errors = cluster.errors()
        assert {errors[id]["error"] for id in ("1", "2")} == {"QuorumError"}
        assert "2 of at least 3 workers came within 3 s (missing: '0')" in errors["1"]["text"]
        assert all(len(workers) >= 3 for _, _, workers in cluster.commits())


@pytest.mark.slow
def test_all_stop_together_when_one_calls_stop(tmp_path):
    with Cluster(job(tmp_path)) as cluster:
        cluster.start("0", "1", "2")
        cluster.start("3", stop_at=17)
        cluster.wait(60)
        assert {(f["step"], f["stopped"]) for f in cluster.finals().values()} == {(17, True)}
        check_against_replay(cluster, *FOUR)


@pytest.mark.slow
def test_a_worker_that_joins_after_the_end_is_refused(tmp_path):
    with Cluster(job(tmp_path, total=5, expect=2)) as cluster:
        cluster.start("0", "1")
        cluster.wait(60)
        cluster.start("2")
        cluster.wait(30, "2")
        error = cluster.errors()["2"]
        assert error["error"] == "EndedError" and "without worker '2'" in error["text"]


@pytest.mark.slow
def test_a_second_process_replaces_the_first_one_with_its_id(tmp_path):
    with Cluster(job(tmp_path, expect=3)) as cluster:
        cluster.start("0", "1", "2")
        cluster.wait_for_step(5)
        first = cluster.running["1"]
        cluster.start("1")
        first.join(30)
        assert not first.is_alive() and cluster.errors()["1"]["error"] == "ReplacedError"
        cluster.wait_for_step(cluster.newest() + 5)
        cluster.wait_for_members("0", "1", "2")
        cluster.end()
        cluster.check_finals("0", "1", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("diloco(period=4)", marks=pytest.mark.nightly),
        pytest.param("post_local_sgd(period=4)", marks=pytest.mark.nightly),
        "power_sgd(rank=1)",
        "streaming_diloco(period=4, fragments=4, delay=0)",
    ],
)
def test_every_method_survives_a_loss_and_a_return(tmp_path, plan):
    with Cluster(job(tmp_path, total=160, plan=plan)) as cluster:
        cluster.start(*FOUR)
        cluster.wait_for_step(12)
        cluster.send("0", signal.SIGKILL)
        cluster.wait_for_step(cluster.newest() + 12)
        cluster.start("0")
        cluster.wait(90)
        finals, errors = cluster.finals(), cluster.errors()
        assert not errors, cluster.tail()
        assert {f["step"] for f in finals.values()} == {160} and len({str(f["final"]) for f in finals.values()}) == 1
        cluster.commits()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["post_local_sgd(every='0.15s')", "diloco(every='0.15s')"])
def test_rounds_by_time_survive_a_loss_and_a_return(tmp_path, plan):
    with Cluster(job(tmp_path, plan=plan, expect=3)) as cluster:
        cluster.start("0", "1")
        cluster.start("2", step_s=0.06)
        cluster.wait_for_step(12)
        cluster.send("0", signal.SIGKILL)
        cluster.wait_for_members("1", "2")
        cluster.start("0")  # with other weights: it receives those of the others
        cluster.wait_for_members("0", "1", "2")
        cluster.end()
        finals, errors = cluster.finals(), cluster.errors()
        assert not errors, cluster.tail()
        assert len({str(final["final"]) for final in finals.values()}) == 1
        cluster.commits()


BY_NIGHT = pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=BY_NIGHT), pytest.param(3, marks=BY_NIGHT)])
@pytest.mark.parametrize(
    ("plan", "repeat"),
    [
        ("streaming_diloco(period=2, fragments=2)", 3),  # a period, and the delay
        ("Plan(Streaming(4, 4, 1))", 5),
        pytest.param("Plan(Streaming(5, 2, 3), ErrorFeedback(Quantized(2)))", 8, marks=BY_NIGHT),
        pytest.param("streaming_diloco(period=8, fragments=2, delay=1)", 5, marks=BY_NIGHT),
        pytest.param("streaming_diloco(period=4, fragments=4, delay=0)", 2, marks=BY_NIGHT),
        pytest.param("diloco(period=4)", 5, marks=BY_NIGHT),
        pytest.param("quantized_ddp()", 2, marks=BY_NIGHT),
    ],
)
def test_a_kill_at_any_step_repeats_few_steps_and_the_worker_joins_again(tmp_path, plan, repeat, seed):
    rng = random.Random(seed)
    faults = tuple(rng.randrange(first, first + 12) for first in range(8, 44, 12))
    with Cluster(job(tmp_path, total=64, plan=plan, momentum=0.0, expect=3, faults=faults)) as cluster:
        cluster.start("0", "1", "2")
        cluster.wait_and_restart(90)
        late = {line["error"] for line in cluster.errors().values()}
        assert late <= {"EndedError"}, cluster.tail()  # of a worker that is started again when the others have finished
        history = cluster.history(repeat=repeat, conserves=True)
        assert len(history.generations) > 1 and history.compared >= len(history.commits) / 2
        assert {line["step"] for line in cluster.finals().values()} == {64}
        assert len({line["shared"] for line in cluster.finals().values()}) == 1


@pytest.mark.parametrize("plan", ["streaming_diloco(period=2, fragments=2)", "Plan(Streaming(4, 4, 1))"])
def test_a_worker_joins_while_a_fragment_is_always_in_flight(tmp_path, plan):
    with Cluster(job(tmp_path, plan=plan, momentum=0.0, expect=2)) as cluster:
        cluster.start("0", "1")
        cluster.wait_for_step(9)
        cluster.start("2")
        cluster.wait_for_members("0", "1", "2")
        cluster.wait_for_step(cluster.newest() + 9)
        cluster.end()
        history = cluster.history(repeat=0, conserves=True)  # to join is no fault
        assert len(history.generations) == 2 and history.compared == len(history.commits)


@pytest.mark.nightly
def test_with_a_fault_every_5_5_steps_at_least_82_percent_of_steps_are_committed(tmp_path):
    rng = random.Random(5)
    at, faults = 3.0, []
    while at < 66:
        faults.append(int(at))
        at += rng.expovariate(1 / 5.5)
    with Cluster(job(tmp_path, total=66, faults=tuple(faults), step_s=0.1)) as cluster:
        cluster.start(*FOUR)
        cluster.wait_and_restart(150)
        assert len(list((tmp_path / "logs").glob("fault-*"))) == len(set(faults))
        assert len(cluster.commits()) == 66
        assert cluster.finals()
        cluster.check_finals(*cluster.finals())
        tried = {tuple(line["tried"]) for line in cluster.lines() if "tried" in line}
        assert 66 / len(tried) >= 0.82, (len(tried), faults)
