"""The training of elastic tests, and the replay of its commits in one process.

Gradients are whole numbers that are divisible by any number of workers up to six: their mean is exact in float64 in
any order of summation, so the replay of the commits must give the same bits.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

SHAPES = ((8, 8), (8, 8), (8, 8), (8, 8), (8,))
DIVISIBLE = 60  # by 1 to 6
LR = 2**-10


class Line(nn.Module):
    """Four matrices and a vector, whose gradient is the data."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.ParameterList(torch.full(shape, start, dtype=torch.float64) for shape in SHAPES)

    def flat(self) -> Tensor:
        return torch.cat([p.reshape(-1) for p in self.w])


def gradient(step: int, worker: int, workers: int) -> Tensor:
    """Make the data of a step, different for each step, worker and number of workers."""
    at = torch.arange(sum(math.prod(shape) for shape in SHAPES), dtype=torch.int64)
    mixed = (step * 1009 + worker * 7919 + workers * 104729 + at * 31) % 997
    return ((mixed - 498) * DIVISIBLE).double()


def optimizer_of(model: nn.Module, momentum: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)


def replay(commits: list[tuple[int, int, list[str]]], momentum: float = 0.5) -> Tensor:
    """Compute in this process, without faults, the weights that the commits lead to.

    A commit of one step averages gradients. A commit of several steps averages weights, after steps without momentum.
    """
    model = Line(1.0)
    optimizer = optimizer_of(model, momentum)
    for since, step, workers in commits:
        assert step == since + 1 or momentum == 0
        n = len(workers)
        gradients = [gradient(number, worker, n) for number in range(since + 1, step + 1) for worker in range(n)]
        mean = torch.stack(gradients).sum(0) / n
        for p, grad in zip(model.w, mean.split([p.numel() for p in model.w]), strict=True):
            p.grad = grad.view_as(p)
        optimizer.step()
    return model.flat().detach()
