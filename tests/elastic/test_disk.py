"""What an elastic worker saves and reads, how it leaves, and which models it refuses."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic import elastic
from laconic.elastic.history import Committed, History, Snapshot, SnapshotStore
from laconic.elastic.rendezvous import Member, Membership
from tests.workers import run_workers


def snapshot(step, residual=0.0, by=None):
    return Snapshot(step, {"session": {"residual": {"w": torch.tensor(residual)}, "step": step}}, by)


def save(folder, id, generation, *steps, last=False):
    store = SnapshotStore(folder, id)
    store.save([snapshot(step, residual=float(id)) for step in steps], generation, wait=True)
    if last:
        store.mark_last(generation)


def newest(folder, id):
    generation, snapshots, last = SnapshotStore(folder, id).newest(2)
    return generation, [each.step for each in snapshots], last


def test_a_worker_reads_its_own_snapshots_first(tmp_path):
    assert newest(tmp_path, "1") == (0, [], True)
    save(tmp_path, "1", 3, 10, 11, last=True)
    save(tmp_path, "2", 3, 11, 12, last=True)
    assert newest(tmp_path, "1") == (3, [10, 11], True)
    assert "residual" in SnapshotStore(tmp_path, "1").newest(2)[1][0].states["session"]


def test_newer_snapshots_of_another_worker_are_read_without_its_residuals(tmp_path):
    save(tmp_path, "1", 3, 10)  # killed
    save(tmp_path, "2", 3, 12, 13, last=True)
    assert newest(tmp_path, "1") == newest(tmp_path, "7") == (3, [12, 13], True)
    save(tmp_path, "3", 4, 13)
    assert newest(tmp_path, "1") == (4, [13], False)
    assert SnapshotStore(tmp_path, "1").newest(2)[1][0].states["session"].keys() == {"step"}


def test_a_damaged_generation_is_skipped(tmp_path):
    save(tmp_path, "1", 3, 10, last=True)
    save(tmp_path, "2", 4, 12, last=True)
    for path in (tmp_path / "worker-2").rglob("*.safetensors"):
        path.write_bytes(b"?")
    assert newest(tmp_path, "2") == (3, [10], True)


def test_the_mark_of_the_last_snapshots_belongs_to_one_generation(tmp_path):
    save(tmp_path, "1", 3, 10, last=True)
    save(tmp_path, "1", 4, 12)
    assert newest(tmp_path, "1") == (4, [12], False)


@pytest.mark.parametrize("read_from", ["0", "1"])
def test_a_worker_that_ends_before_it_has_joined_again_does_not_take_the_others_back(tmp_path, read_from):
    save(tmp_path, read_from, 6, 541, 561)  # in the background: worker 1 was killed, and the others commit more
    waiting = History({}, SnapshotStore(tmp_path, "1"))
    waiting.begin(0)
    # The store's host dies. Workers 0 and 2 end in order, and so does worker 1, which waits to join.
    for id in ("0", "2"):
        save(tmp_path, id, 6, 561, 581, last=True)
    waiting.close()
    members = []
    for id in ("0", "1", "2"):
        generation, steps, in_memory = newest(tmp_path, id)
        members.append(Member(id, id, generation, tuple(steps), in_memory))
    assert Membership(0, 7, tuple(members)).base == 581


def test_the_workers_of_a_commit_are_saved(tmp_path):
    by = Committed(9, 10, ("0", "1"))
    SnapshotStore(tmp_path, "1").save([snapshot(10, by=by)], 3, wait=True)
    assert SnapshotStore(tmp_path, "1").newest(1)[1][0].by == by


def _leave_and_come_back(worker: int, folder: str) -> None:
    ends, store = [], HashStore()
    for leaves_at in (7, None):
        world = elastic.join(store, id=0, heartbeat_timeout_s=0.5)
        torch.manual_seed(worker)
        model = torch.nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        session = laconic.attach(laconic.post_local_sgd(period=2), model, optimizer)
        with elastic.Run(world, session, model, optimizer, folder=folder) as run:
            run.leave_on()
            for step in run.steps(10):
                with step:
                    if step.number == leaves_at:
                        os.kill(os.getpid(), signal.SIGTERM)
                    model(torch.full((2, 4), float(step.number))).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append((session.step, run.stopped, run.leaving))
    assert ends == [(6, True, True), (10, False, False)]


def test_a_worker_leaves_with_its_last_commit_and_continues_from_it(tmp_path):
    run_workers(_leave_and_come_back, 1, (str(tmp_path / "saved"),), group=False)


def _refuse_ddp(worker: int) -> None:
    world = elastic.join(HashStore(), id=0)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), model, optimizer)
    for given in (model, torch.nn.Sequential(model)):
        with pytest.raises(ValueError, match="DistributedDataParallel keeps the process group that it was made with"):
            elastic.Run(world, session, given, optimizer)
    with pytest.raises(RuntimeError, match="Leave out init_process_group"):
        elastic.join(HashStore(), id=0)
    world.leave()
    dist.destroy_process_group()


def test_ddp_models_are_refused():
    run_workers(_refuse_ddp, 1, group=False)


def test_torchrun_names_the_run_and_the_worker(monkeypatch):
    for name, value in {"TORCHELASTIC_RUN_ID": "job-7", "LOCAL_RANK": "2", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.gethostname", lambda: "_node a.example")
    parents = [77]  # the parent of the test process may be gone
    monkeypatch.setattr("os.getppid", lambda: parents[-1])
    world = elastic.join(HashStore())
    assert repr(world) == "<ElasticWorld 'job-7' as worker 'node-a.example-77-2'>"
    before = world.orphaned
    parents.append(1)
    assert (before, world.orphaned) == (False, True)
    world.leave()
    by_name = elastic.join(HashStore(), run="mine", id=3)
    assert repr(by_name) == "<ElasticWorld 'mine' as worker '3'>" and not by_name.orphaned
    by_name.leave()
