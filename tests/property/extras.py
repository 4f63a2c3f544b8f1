"""What the oracle averages beside weights: buffers and the optimizers' moments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def average_buffers(nets: Sequence[nn.Module], sound: Sequence[nn.Module], how: str) -> None:
    """Average the buffers of workers, those of the `sound` ones, or give all those of the first sound one."""
    sound = [net for net in sound if finite(net.buffers())]
    for name, first in list(sound[0].named_buffers()) if sound else []:
        if how == "average" and first.is_floating_point():
            mean = sum((net.get_buffer(name) for net in sound), torch.zeros(())) / len(sound)
        elif how == "leader":
            mean = first.clone()
        else:
            continue
        for net in nets:
            net.get_buffer(name).copy_(mean)


def average_moments(workers: Sequence[tuple[Optimizer, Mapping[str, Tensor]]], names: Iterable[str]) -> None:
    """Average the moments of parameters that have them on every worker."""
    for name in names:
        states = [optimizer.state.get(params[name], {}) for optimizer, params in workers]
        if all(states):
            for key in [key for key, t in states[0].items() if t is not None and t.dim()]:
                mean = sum((state[key] for state in states), torch.zeros(())) / len(states)
                for state in states:
                    state[key].copy_(mean)


def reset_moments(optimizer: Optimizer, params: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Drop the moments of some parameters."""
    for name in names:
        optimizer.state.get(params[name], {}).clear()


def finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no tensor holds NaN or Inf."""
    return all(bool(t.isfinite().all()) for t in tensors)
