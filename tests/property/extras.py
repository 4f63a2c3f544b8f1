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


def share_buffers(nets: Sequence[nn.Module]) -> None:
    """Give all workers the buffers of the first whose buffers are finite."""
    sound = [net for net in nets if finite(net.buffers())]
    for net in nets if sound else []:
        for b, first in zip(net.buffers(), sound[0].buffers(), strict=True):
            b.copy_(first)


def moments_of(optimizer: Optimizer, params: Mapping[str, Tensor]) -> list[Tensor]:
    """Return all moments of these parameters."""
    states = [optimizer.state.get(p, {}) for p in params.values()]
    return [t for state in states for t in state.values() if t is not None and t.dim()]


def average_moments(
    workers: Mapping[int, tuple[Optimizer, Mapping[str, Tensor]]], sound: Sequence[int], names: Iterable[str]
) -> list[str]:
    """Average the moments of parameters that have them on every worker, those of the sound ones; return the names."""
    shared = []
    for name in names:
        states = {worker: optimizer.state.get(params[name], {}) for worker, (optimizer, params) in workers.items()}
        if all(states.values()):
            shared.append(name)
            for key in [key for key, t in states[sound[0]].items() if t is not None and t.dim()]:
                mean = sum((states[worker][key] for worker in sound), torch.zeros(())) / len(sound)
                for state in states.values():
                    state[key].copy_(mean)
        else:
            for worker in set(states) - set(sound):
                states[worker].clear()
    return shared


def equal_counters(workers: Sequence[tuple[Optimizer, Mapping[str, Tensor]]], names: Iterable[str]) -> None:
    """Set the counters of optimizers, such as Adam's steps, to the largest."""
    for name in names:
        states = [optimizer.state[params[name]] for optimizer, params in workers]
        for key in [key for key, t in states[0].items() if t is not None and not t.dim()]:
            largest = max(float(state[key]) for state in states)
            for state in states:
                state[key].fill_(largest)


def reset_moments(optimizer: Optimizer, params: Mapping[str, Tensor], names: Iterable[str]) -> None:
    """Drop the moments of some parameters."""
    for name in names:
        optimizer.state.get(params[name], {}).clear()


def finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no tensor holds NaN or Inf."""
    return all(bool(t.isfinite().all()) for t in tensors)
