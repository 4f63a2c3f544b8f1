"""A divided network: hosts in network namespaces. At most one part continues, and the other can come back."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore

import laconic
from tests.elastic.cluster import Cluster, Job
from tests.namespaces import move_to, needs_root, sites
from tests.workers import _context

pytestmark = [*needs_root, pytest.mark.slow]


def job(tmp_path, network, store, **given):
    """Make a job whose store is on one of the hosts."""
    logs = tmp_path / "logs"
    (logs / "tmp").mkdir(parents=True)
    plain = {"total": 10**9, "step_s": 0.02, "wait_s": 4.0, "folder": str(tmp_path / "saved")}
    return Job(port=0, logs=str(logs), store=network.hosts[store], **{**plain, **given})


def start(cluster, network, *ids):
    for id in ids:
        cluster.start(id, host=network.hosts[int(id)][0])


def check_end(cluster, *ids):
    """All workers end with the weights that the commits lead to; there is one chain of commits."""
    cluster.end()
    assert set(cluster.finals()) == set(ids), cluster.tail()
    cluster.check_finals(*ids)


@pytest.mark.parametrize(
    "how",
    ["unplug", pytest.param("deafen", marks=pytest.mark.nightly), pytest.param("mute", marks=pytest.mark.nightly)],
)
def test_one_worker_is_disconnected_and_comes_back(tmp_path, how):
    with sites(5) as network, Cluster(job(tmp_path, network, store=4, least=3, expect=4)) as cluster:
        start(cluster, network, "0", "1", "2", "3")
        cluster.wait_for_step(10)
        getattr(network, how)(3)
        cluster.wait_for_members("0", "1", "2")
        cluster.wait(60, "3")
        error = cluster.errors()["3"]
        assert error["error"] == "StoreLostError" and f"{network.hosts[4][1]}:{cluster.job.port}" in error["text"]
        cluster.wait_for_step(cluster.newest() + 10)
        assert cluster.members() == ["0", "1", "2"]
        network.plug_in(3) if how == "unplug" else network.mend(3)
        start(cluster, network, "3")
        cluster.wait_for_members("0", "1", "2", "3")
        check_end(cluster, "0", "1", "2", "3")


def test_the_part_with_the_store_and_enough_workers_continues(tmp_path):
    with sites(2, 4) as network, Cluster(job(tmp_path, network, store=5, least=3, expect=5)) as cluster:
        start(cluster, network, "0", "1", "2", "3", "4")
        cluster.wait_for_step(10)
        network.part()
        cluster.wait_for_members("2", "3", "4")
        cluster.wait(60, "0", "1")
        assert {id: line["error"] for id, line in cluster.errors().items()} == dict.fromkeys("01", "StoreLostError")
        network.join()
        start(cluster, network, "0", "1")
        cluster.wait_for_members("0", "1", "2", "3", "4")
        check_end(cluster, "0", "1", "2", "3", "4")


def test_all_stop_if_the_part_with_the_store_has_too_few_workers(tmp_path):
    with sites(3, 3) as network, Cluster(job(tmp_path, network, store=2, least=3, expect=5)) as cluster:
        ids = ["0", "1", "3", "4", "5"]
        start(cluster, network, *ids)
        cluster.wait_for_step(10)
        network.part()
        cluster.wait(60)
        errors = cluster.errors()
        assert {id: line["error"] for id, line in errors.items()} == {
            **dict.fromkeys("01", "QuorumError"),
            **dict.fromkeys("345", "StoreLostError"),
        }
        assert "2 of at least 3 workers came within 4 s (missing: '3', '4', '5')" in errors["0"]["text"]
        assert {tuple(workers) for _, _, workers in cluster.commits()} == {tuple(ids)}, "neither part has continued"
        network.join()
        start(cluster, network, *ids)  # from their folders
        cluster.wait_for_step(cluster.newest() + 10)
        check_end(cluster, *ids)


def test_a_short_interruption_loses_no_worker(tmp_path):
    slow = {"least": 3, "expect": 4, "heartbeat_timeout_s": 8.0, "timeout_s": 30.0}
    with sites(5) as network, Cluster(job(tmp_path, network, store=4, **slow)) as cluster:
        start(cluster, network, "0", "1", "2", "3")
        cluster.wait_for_step(10)
        network.unplug(3)
        time.sleep(1)
        network.plug_in(3)
        cluster.wait_for_step(cluster.newest() + 20)
        assert {line["tried"][0] for line in cluster.lines() if "tried" in line} == {1}, "one generation"
        check_end(cluster, "0", "1", "2", "3")


def _train_until_lost(worker: int, hosts: list[tuple[str, str]], port: int, pipe: Connection) -> None:
    """Train without laconic.elastic until a worker is lost; worker 0 hosts the store."""
    move_to(hosts[worker][0])
    torch.set_num_threads(1)
    store = TCPStore(hosts[0][1], port, len(hosts), is_master=worker == 0)
    dist.init_process_group("gloo", store=store, rank=worker, world_size=len(hosts))
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), model, optimizer, timeout_s=3)
    try:
        while True:
            model(torch.ones(2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if session.step == 20:
                pipe.send("trains")
            time.sleep(0.02)
    except laconic.LostWorkerError as error:
        pipe.send((str(error), error.missing))
    pipe.recv()  # worker 0 keeps the store until all have reported
    os._exit(0)


def test_without_elastic_all_workers_report_the_missing_one(tmp_path):
    with sites(4) as network, ExitStack() as undo:
        pipes = []
        for worker in range(4):
            here, there = _context.Pipe()
            process = _context.Process(target=_train_until_lost, args=(worker, network.hosts, 29500, there))
            process.start()
            undo.callback(process.join)
            undo.callback(process.kill)
            pipes.append(here)
        for pipe in pipes:
            assert pipe.poll(60) and pipe.recv() == "trains"
        network.unplug(3)
        reports = []
        for pipe in pipes:
            assert pipe.poll(30), "a worker reports nothing"
            reports.append(pipe.recv())
    assert [missing for _, missing in reports] == [[3], [3], [3], []], reports
    assert "worker 3 did not respond" in reports[0][0]
    assert "does not respond" in reports[3][0]
