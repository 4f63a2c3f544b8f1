"""The model that is trained, its data and its optimizers: the same for a worker in fp32 and for the oracle in fp64."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

WIDTH, WIDE = 24, 132
LR = 0.05
DECAY = 0.8
"""What a scheduler multiplies the learning rate by at every step."""


class Net(nn.Module):
    """Matrices that compress, vectors that do not, and what `features` ask for."""

    def __init__(self, features: frozenset[str], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, WIDTH, bias="batch_norm" not in features)  # which would take it out again
        self.norm = nn.BatchNorm1d(WIDTH) if "batch_norm" in features else nn.Identity()
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.branch = nn.Linear(WIDTH, 16) if "branch" in features else None
        self.down = nn.Linear(WIDTH, 16)
        self.scale = nn.Parameter(torch.ones(1))
        if "tied" in features:
            self.again.weight = self.mid.weight
        if "complex" in features:
            self.turn = nn.Parameter(torch.randn(WIDTH // 2, dtype=torch.complex64))
        for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
            if name in features:
                self.register_parameter(name, nn.Parameter((torch.randn(WIDTH, 16) / 5).to(dtype)))
        if "frozen" in features:
            self.first.requires_grad_(False)
        self.wide: nn.Module | None = None
        if "wide" in features:  # a matrix that rank 32 shrinks, and that has more than a chunk of 4096 numbers
            self.wide = nn.Sequential(
                nn.Linear(WIDTH, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 16)
            )
        self.added: nn.Linear | None = None

    def forward(self, x: Tensor, branch: bool) -> Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        if hasattr(self, "turn"):
            turned = torch.complex(h[:, : WIDTH // 2], h[:, WIDTH // 2 :]) * self.turn
            h = torch.cat([turned.real, turned.imag], dim=1)
        h = h + torch.tanh(self.again(torch.tanh(self.mid(h))))
        y: Tensor = self.down(h) * self.scale
        if branch and self.branch is not None:
            y = y + self.branch(h)
        if self.wide is not None:
            y = y + self.wide(h)
        for name in ("bf16", "fp16"):
            if hasattr(self, name):
                y = y + h @ getattr(self, name).to(h.dtype)
        return y if self.added is None else y + self.added(y)

    def add(self, seed: int) -> None:
        """Add a layer after the model was attached."""
        torch.manual_seed(seed)
        like = self.scale
        self.added = nn.Linear(16, 16).to(like.dtype)


def loss_of(model: nn.Module, seed: int, worker: int, step: int, part: int, branch: bool, dtype: torch.dtype) -> Tensor:
    """Compute the loss on data that differ between workers, steps and the parts that are accumulated."""
    number = ((seed * 101 + step) * 11 + part) * 7 + worker
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(number)).to(dtype)
    target = torch.cat([x[:, :1] * x[:, 1:2], x], dim=1).repeat(1, 2)[:, :16]
    return F.mse_loss(model(x, branch), target) * 4


def wide(net: Net) -> Net:
    """Turn a model to fp64, complex parameters to complex128."""
    for module in net.modules():
        for p in module.parameters(recurse=False):
            kind = torch.complex128 if p.is_complex() else torch.float64
            p.data = p.data.to(kind)
        for name, b in module.named_buffers(recurse=False):
            if b.is_floating_point():
                setattr(module, name, b.double())
    return net


def optimizer_of(kind: str, params: Iterable[Tensor]) -> Optimizer:
    """Make an optimizer whose steps are smooth functions of the gradients, so that fp32 stays close to fp64."""
    if kind == "sgd":
        return torch.optim.SGD(params, lr=LR, momentum=0.8, weight_decay=0.01)
    return torch.optim.AdamW(params, lr=LR, eps=0.1, weight_decay=0.05)


def learning_rate(steps: int, scheduled: bool) -> float:
    """Return the learning rate after so many steps."""
    return LR * DECAY**steps if scheduled else LR


def clip(gradients: Iterable[Tensor], limit: float) -> None:
    """Clip by global norm, as `clip_grad_norm_` does."""
    some = list(gradients)
    norm = math.sqrt(sum(float(g.abs().pow(2).sum()) for g in some))
    factor = limit / (norm + 1e-6)
    for g in some:
        g.mul_(1.0 if factor > 1 else factor)  # NaN stays NaN
