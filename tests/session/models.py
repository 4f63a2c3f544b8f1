"""Small models and data for the tests with real workers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(seed: int = 0, width: int = 32, depth: int = 3, classes: int = 4) -> nn.Sequential:
    """Layers enough for several DDP buckets; equal on every worker."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, classes))


def batch(worker: int, step: int, width: int = 32, size: int = 8) -> tuple[Tensor, Tensor]:
    """Return data that differs between workers and steps."""
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(size, width, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def weights(model: nn.Module) -> Tensor:
    """Return all parameters as one vector."""
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def assert_equal_bits(vectors: list[Tensor]) -> None:
    """Check that all workers ended with the same bits."""
    for worker, vector in enumerate(vectors[1:], start=1):
        assert torch.equal(vectors[0], vector), f"worker {worker} differs by {(vectors[0] - vector).abs().max()}"
