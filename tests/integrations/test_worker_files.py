"""Each worker's file beside a framework's checkpoint: exact, whole, and refused where it does not fit."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic.checkpoint import CheckpointError
from laconic.codecs.feedback import residuals_by_name
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


def _train(session: laconic.Session, model: nn.Module, worker: int) -> None:
    (optimizer,) = session.optimizers
    for _ in range(3):
        x = torch.full((2, next(model.parameters()).shape[1]), 0.1 * (worker + 1))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _save_or_resize(worker: int, folder: str, text: str, resize: worker_files.Resize | None) -> object:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    with laconic.attach(text, model, optimizer) as session:
        if resize is None:
            _train(session, model, worker)
            worker_files.save(folder, session)
            return session.state_dict()["state"], weights(model)
        with pytest.raises(
            CheckpointError, match=r"was saved by 2 workers, and there are 3: .* Start 2 workers\. To go"
        ):
            worker_files.load(folder, session, "leave it")
        match = (
            r"Start 2 workers, or divide what they have not sent yet among those that are there: this\. To go .* leave"
        )
        with pytest.raises(CheckpointError, match=match):
            worker_files.load(folder, session, "leave it", resizing="this")
        worker_files.restore_own(session, worker_files.load(folder, session, "leave it", resize=resize))
        found = deepcopy(session.state_dict()["state"]), weights(model), session.step
        _train(session, model, worker)  # and they go on together
        return found


@pytest.mark.parametrize("text", ["power_sgd(rank=1, min_compression=0)", "post_local_sgd(period=2)"])
def test_another_number_of_workers_goes_on_where_that_is_asked_for(text, tmp_path):
    (first, _), (second, other) = run_workers(_save_or_resize, 2, (str(tmp_path), text, None))
    found = run_workers(_save_or_resize, 3, (str(tmp_path), text, "sum"))
    assert [each[2] for each in found] == [3, 3, 3]
    assert_equal_bits([other, found[1][1]] if "local" in text else [found[0][1], found[1][1]])
    if "local" not in text:
        residuals = [residuals_by_name(state["gradient"]) for state in (first, second, *(each[0] for each in found))]
        for name, mine in residuals[0].items():
            assert_equal_bits([mine, residuals[2][name]])
            assert_equal_bits([residuals[1][name], residuals[3][name]])
            assert not residuals[4][name].any(), "a worker that joins has nothing to send yet"


def test_ways_to_resize_are_checked():
    with pytest.raises(ValueError, match=r'checkpoint\(resize=True\): resize must be "sum", "mean" or None\.'):
        worker_files.check_resize("checkpoint", True)
