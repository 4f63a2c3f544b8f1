"""Each worker's file beside a framework's checkpoint: exact, whole, and refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.checkpoint import CheckpointError
from laconic.integrations import worker_files
from tests.session.models import assert_equal_bits, mlp, weights
from tests.workers import WorkerError, run_workers


def _save_between_two_syncs(worker: int, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    def build() -> tuple[nn.Module, torch.optim.Optimizer, laconic.Session]:
        model = DDP(mlp())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return model, optimizer, laconic.attach(laconic.diloco(period=4), model, optimizer)

    def step() -> None:
        x = torch.full((2, next(model.parameters()).shape[1]), 0.1 * (worker + 1))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, session = build()
    for _ in range(3):
        step()
    worker_files.save(folder, session)
    first = (model.state_dict(), optimizer.state_dict()) if worker == 0 else None
    if first is not None:
        torch.save(first, Path(folder, "framework.pt"))  # what a framework saves
    for _ in range(2):
        step()
    whole = weights(model)
    session.detach()
    torch.distributed.barrier()
    model, optimizer, session = build()
    saved = torch.load(Path(folder, "framework.pt"), weights_only=True)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    worker_files.restore_own(session, worker_files.load(folder, session, "leave it"))
    for _ in range(2):
        step()
    return whole, weights(model)


def test_workers_that_differ_go_on_exactly(tmp_path):
    for whole, again in run_workers(_save_between_two_syncs, 2, (str(tmp_path),)):
        assert_equal_bits([whole, again])
    both = ["laconic_0.safetensors", "laconic_1.safetensors"]
    assert sorted(each.name for each in tmp_path.glob("*laconic*")) == both


def _shard(worker: int) -> None:
    model = mlp()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    group = mesh["replicate"].get_group()
    session = laconic.attach(laconic.diloco(period=4), model, optimizer, group=group)
    worker_files.check_can_save(session)


def test_local_steps_on_shards_are_refused():
    with pytest.raises(WorkerError, match=r"diloco\(period=4\) on a sharded model: .* Use a plan that averages grad"):
        run_workers(_shard, 2)


def _session() -> laconic.Session:
    model = nn.Linear(4, 1)
    return laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_files_that_are_not_a_workers_are_refused(tmp_path):
    with _session() as session:
        worker_files.save(tmp_path, session)
        path = tmp_path / worker_files.file_name(0)
        data = path.read_bytes()
        path.write_bytes(data[:-1])
        with pytest.raises(CheckpointError, match=r"laconic_0.safetensors cannot be read: .*alone.*, leave it\."):
            worker_files.load(tmp_path, session, "leave it")
        path.rename(tmp_path / "target")
        path.symlink_to(tmp_path / "target")
        with pytest.raises(CheckpointError, match=r"is not a regular file"):
            worker_files.load(tmp_path, session, "leave it")
        path.unlink()
        path.write_bytes(data.replace(b"laconic worker 1", b"laconic worker 9"))
        with pytest.raises(CheckpointError, match=r"is not what worker 0 saves with this version of laconic"):
            worker_files.load(tmp_path, session, "leave it")


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    with _session() as session:
        worker_files.save(tmp_path, session)
        before = (tmp_path / "laconic_0.safetensors").read_bytes()

        def full(*_: object) -> None:
            raise OSError("No space left on device")

        monkeypatch.setattr(worker_files, "write_state", full)
        with pytest.raises(OSError, match="No space"):
            worker_files.save(tmp_path, session)
        assert (tmp_path / "laconic_0.safetensors").read_bytes() == before
