"""A network that is cut (F8): real hosts, real cables. At most one part goes on; what was cut off can come back."""

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
from tests.elastic.chaos import Crowd, Job, replay
from tests.namespaces import move_to, needs_root, sites
from tests.workers import _context

pytestmark = needs_root


def job(tmp_path, network, store, **given):
    """Workers of whom most must be there; the store is on one of the hosts."""
    logs = tmp_path / "logs"
    (logs / "tmp").mkdir(parents=True)
    plain = {"total": 10**9, "step_s": 0.02, "wait_s": 4.0, "folder": str(tmp_path / "saved")}
    return Job(port=0, logs=str(logs), store=network.hosts[store], **{**plain, **given})


def start(crowd, network, *ids):
    for id in ids:
        crowd.start(id, host=network.hosts[int(id)][0])


def check_end(crowd, ids):
    """All have the weights that the committed rounds lead to, of which there is one chain."""
    crowd.end()
    finals, expected = crowd.finals(), replay(crowd.commits())
    assert set(finals) == set(ids), crowd.tail()
    for final in finals.values():
        assert torch.equal(torch.tensor(final["final"], dtype=torch.float64), expected)


@pytest.mark.parametrize("how", ["unplug", "deafen", pytest.param("mute", marks=pytest.mark.nightly)])
def test_one_worker_is_cut_off_and_comes_back(tmp_path, how):
    with sites(5) as network, Crowd(job(tmp_path, network, store=4, least=3, expect=4)) as crowd:
        start(crowd, network, "0", "1", "2", "3")
        crowd.wait_for_step(10)
        getattr(network, how)(3)
        cut_at = time.time()
        crowd.wait_for_members("0", "1", "2")
        crowd.wait(60, "3")
        said = crowd.errors()["3"]
        assert said["error"] == "StoreLostError" and f"{network.hosts[4][1]}:{crowd.job.port}" in said["text"]
        assert said["at"] - cut_at < 30
        crowd.wait_for_step(crowd.newest() + 10)
        assert crowd.members() == ["0", "1", "2"]
        network.plug_in(3) if how == "unplug" else network.mend(3)
        start(crowd, network, "3")
        crowd.wait_for_members("0", "1", "2", "3")
        check_end(crowd, ["0", "1", "2", "3"])


def test_of_two_halves_that_with_the_store_and_enough_workers_goes_on(tmp_path):
    with sites(2, 4) as network, Crowd(job(tmp_path, network, store=5, least=3, expect=5)) as crowd:
        start(crowd, network, "0", "1", "2", "3", "4")
        crowd.wait_for_step(10)
        network.part()
        crowd.wait_for_members("2", "3", "4")
        crowd.wait(60, "0", "1")
        assert {id: line["error"] for id, line in crowd.errors().items()} == dict.fromkeys("01", "StoreLostError")
        network.join()
        start(crowd, network, "0", "1")
        crowd.wait_for_members("0", "1", "2", "3", "4")
        check_end(crowd, ["0", "1", "2", "3", "4"])


def test_too_few_workers_with_the_store_and_enough_without_it_all_stop(tmp_path):
    with sites(3, 3) as network, Crowd(job(tmp_path, network, store=2, least=3, expect=5)) as crowd:
        ids = ["0", "1", "3", "4", "5"]
        start(crowd, network, *ids)
        crowd.wait_for_step(10)
        network.part()
        crowd.wait(60)
        errors = crowd.errors()
        assert {id: line["error"] for id, line in errors.items()} == {
            **dict.fromkeys("01", "QuorumError"),
            **dict.fromkeys("345", "StoreLostError"),
        }
        assert "2 of at least 3 workers came within 4 s (missing: '3', '4', '5')" in errors["0"]["text"]
        assert {tuple(workers) for _, _, workers in crowd.commits()} == {tuple(ids)}, "neither part has gone on"
        network.join()
        start(crowd, network, *ids)  # from their disks
        crowd.wait_for_step(crowd.newest() + 10)
        check_end(crowd, ids)


def test_a_cable_that_is_soon_back_costs_nobody_a_place(tmp_path):
    patient = {"least": 3, "expect": 4, "silence_s": 8.0, "timeout_s": 30.0}
    with sites(5) as network, Crowd(job(tmp_path, network, store=4, **patient)) as crowd:
        start(crowd, network, "0", "1", "2", "3")
        crowd.wait_for_step(10)
        network.unplug(3)
        time.sleep(1)
        network.plug_in(3)
        crowd.wait_for_step(crowd.newest() + 20)
        assert {line["tried"][0] for line in crowd.lines() if "tried" in line} == {1}, "one generation"
        check_end(crowd, ["0", "1", "2", "3"])


def _until_cut(worker: int, hosts: list[tuple[str, str]], port: int, pipe: Connection) -> None:
    """Train without laconic.elastic until somebody is lost; worker 0 holds the store."""
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
    pipe.recv()  # the store is there until all have had their say
    os._exit(0)


def test_without_elastic_all_are_told_who_is_missing(tmp_path):
    with sites(4) as network, ExitStack() as undo:
        pipes = []
        for worker in range(4):
            here, there = _context.Pipe()
            process = _context.Process(target=_until_cut, args=(worker, network.hosts, 29500, there))
            process.start()
            undo.callback(process.join)
            undo.callback(process.kill)
            pipes.append(here)
        for pipe in pipes:
            assert pipe.poll(60) and pipe.recv() == "trains"
        network.unplug(3)
        said = []
        for pipe in pipes:
            assert pipe.poll(30), "a worker says nothing"
            said.append(pipe.recv())
    assert [missing for _, missing in said] == [[3], [3], [3], []], said
    assert "worker 3 did not answer" in said[0][0]
    assert "does not answer" in said[3][0]
