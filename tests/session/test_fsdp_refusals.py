"""What is refused of sharded models, and with which words; the page about them, and the example, run."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import laconic
from laconic import DisagreementError
from tests.session.sharding import attached, net, sharded, two_by_two
from tests.workers import free_port, run_workers

ROOT = Path(__file__).parents[2]


def _attach(model: Any, plan: laconic.Plan | None = None, **options: Any) -> laconic.Session:
    return laconic.attach(plan or laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def _refuse_groups(worker: int) -> None:
    mesh = two_by_two()
    peer = worker ^ 1
    named = rf"0.weight is sharded over workers \[.*\], and the group that averages it contains worker {peer},"
    named += r".*hold the same shard.*group=mesh\[\"replicate\"\].get_group\(\)"
    for group in (None, mesh["shard"].get_group()):
        with pytest.raises(ValueError, match=named):
            _attach(sharded(mesh["shard"]), group=group)
    with pytest.raises(ValueError, match=r"0.weight is sharded over workers \[0, 1, 2, 3\]"):
        _attach(sharded(init_device_mesh("cpu", (4,))))
    with pytest.raises(ValueError, match="hold the same shard"):
        _attach(sharded(mesh), group=mesh["shard"].get_group())

    crossed = [dist.new_group([0, 3]), dist.new_group([1, 2])][worker in (1, 2)]
    parts = r"the shards that they hold: .*0.weight \[24, 8\] float32, part . of 2, while worker 0 .* part . of 2"
    with pytest.raises(DisagreementError, match=parts):
        _attach(sharded(mesh["shard"]), group=crossed)
    assert _attach(sharded(mesh["shard"]), levels=mesh["replicate"]).workers == 2


def test_groups_that_mix_shards_are_refused():
    run_workers(_refuse_groups, 4)


def _refuse_models(worker: int) -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = two_by_two()
    group = mesh["replicate"].get_group()
    partly = net()
    fully_shard(partly[1], mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"0.weight is trained and not sharded.*fully_shard\(model\)"):
        _attach(partly, group=group)
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel\(...\)\): its flat parameters.*fully_shard instead"):
        _attach(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
    with pytest.raises(ValueError, match="Linear is replicated, not sharded"):
        _attach(replicate(nn.Linear(8, 8), mesh=mesh["replicate"]), group=group)

    parallel = nn.Linear(8, 4, bias=False)  # as tensor parallelism has it
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight.detach(), mesh["shard"], [Shard(0)]))
    with pytest.raises(ValueError, match="weight is sharded over workers"):
        _attach(parallel)
    assert _attach(parallel, group=group).workers == 2

    crossed = nn.Linear(8, 4)
    crossed.weight = nn.Parameter(distribute_tensor(crossed.weight.detach(), mesh["shard"], [Shard(0)]))
    crossed.bias = nn.Parameter(distribute_tensor(crossed.bias.detach(), mesh["replicate"], [Shard(0)]))
    alone = [dist.new_group([each]) for each in range(4)][worker]
    with pytest.raises(
        ValueError, match=r"are sharded over workers \[.*and others over.*Shard all parameters inside one"
    ):
        _attach(crossed, group=alone)

    changed: Any = sharded(mesh)
    state = changed._get_fsdp_state()
    (unit,) = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    del unit.all_reduce_grads
    with pytest.raises(RuntimeError, match=r"FSDP of torch .* is not as laconic expects \(.*all_reduce_grads"):
        _attach(changed)


def test_models_that_are_sharded_otherwise_are_refused():
    run_workers(_refuse_models, 4)


def _refuse_plans(worker: int) -> None:
    mesh = two_by_two()
    with pytest.raises(ValueError, match="a sharded model has its inner groups in its mesh"):
        _attach(sharded(mesh), laconic.diloco(period=2, group=2))
    session = attached("ddp()", "2-D", mesh)[2]
    assert session is not None
    with pytest.raises(ValueError, match="a sharded model has its inner groups in its mesh"):
        session.change(laconic.diloco(period=2, group="machine"))
    session.change(laconic.diloco(period=2))


def test_plans_with_inner_groups_are_refused():
    run_workers(_refuse_plans, 4)


def _as_torchrun(worker: int, port: int, folder: str, job: str) -> str:
    os.environ |= {"RANK": str(worker), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    if job.endswith(".py"):
        sys.argv, told = [job, "41"], io.StringIO()
        with contextlib.redirect_stdout(told):
            runpy.run_path(job, run_name="__main__")
        return told.getvalue()
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python torchrun\n(.*?)^```", Path(job).read_text(), re.M | re.S):
        exec(compile(block, job, "exec"), names)  # noqa: S102 - the documentation's own code
    dist.destroy_process_group()
    return repr(names["session"])


def test_the_page_runs(tmp_path):
    job = str(ROOT / "docs" / "sharded.md")
    told = run_workers(_as_torchrun, 4, (free_port(), str(tmp_path), job), group=False)
    assert told == ["<Session diloco(period=3) at step 4, 2 workers>"] * 4


def test_the_example_runs(tmp_path):
    job = str(ROOT / "examples" / "sharded.py")
    told = run_workers(_as_torchrun, 4, (free_port(), str(tmp_path), job), group=False)
    assert re.search(r"diloco\(period=20\): loss 0.0\d+, sent [\d,]+ bytes to the other replica", told[0])
    assert told[1:] == [""] * 3
