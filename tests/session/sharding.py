"""A small model, sharded by FSDP2 over two replicas of two shards each, for the tests with real workers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import laconic
from laconic.session.live_model import local_of
from tests.session.models import assert_equal_bits


class Block(nn.Module):
    """Matrices that compress, and shapes that two shards cannot share evenly: [33, 24], [33], [1]."""

    def __init__(self, width: int = 24, hidden: int = 33) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.scale * self.down(torch.tanh(self.up(x)))
        return result


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), Block(), Block(), nn.Linear(24, 1))


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, seed: int = 0, **options: Any) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    model = net(seed).to(options.pop("dtype", torch.float32))
    for block in (model[1], model[2]):
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def attached(
    plan: str, way: str, mesh: DeviceMesh, seed: int = 0, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, laconic.Session | None]:
    """Shard and attach: "native" is torch's own HSDP, "1-D" and "2-D" are laconic's two ways to it."""
    model = sharded(mesh["shard"] if way == "1-D" else mesh, seed, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if way == "native":
        return model, optimizer, None
    group = mesh["replicate"].get_group() if way == "1-D" else None
    return model, optimizer, laconic.attach(laconic.plan(plan), model, optimizer, group=group)


def batch(worker: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(16, 8, generator=generator)
    return x.to(dtype), torch.tanh(x[:, :1] - 2 * x[:, 1:2]).to(dtype)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, count: int, first: int = 0) -> list[float]:
    """Train with clipping; return the losses and the norms that clipping saw."""
    seen = []
    for step in range(first, first + count):
        x, y = batch(worker, step, next(model.parameters()).dtype)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), norm.full_tensor().item()]  # type: ignore[attr-defined]
    return seen


def shards(model: nn.Module) -> Tensor:
    return torch.cat([local_of(p).reshape(-1) for p in model.parameters()])


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([local_of(p.grad).reshape(-1) for p in model.parameters() if p.grad is not None])


def assert_replicas_equal(per_worker: list[Tensor]) -> None:
    """Workers 0 and 2 hold the first shards, 1 and 3 the second."""
    assert_equal_bits([per_worker[0], per_worker[2]])
    assert_equal_bits([per_worker[1], per_worker[3]])
