"""Averaging parameters or parameter groups. The twin of torch's module.

Different from torch's: parameters are averaged in place, bucket by bucket, and keep storage, strides and dtype; which
ones take part depends on the model, never on whether a gradient happens to be there; replicas that are equal stay
bit-equal; and workers that bring different parameters are told so, all of them, before anything is averaged.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.hooking import group_or_world
from laconic.checks.agreement import agree, parameter_facts
from laconic.comm.averaging import average_in_place
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]

Params = Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]] | Iterable[dict[str, Any]]


def average_parameters(params: Iterator[torch.nn.Parameter], process_group: dist.ProcessGroup | None) -> None:
    """Replace each parameter by its mean over the workers of `process_group`; workers outside it are left alone."""
    if dist.get_rank(process_group) < 0:
        return
    named = {f"parameter {index}": p for index, p in enumerate(params)}
    _meeting(process_group).average(named)


def get_params_to_average(params: Params) -> list[torch.nn.Parameter]:
    """List the parameters that are to be averaged: floating-point ones that are trained.

    torch leaves out those without a gradient on this worker, so that after `zero_grad()` nothing is left, and workers
    whose gradients differ average different parameters with each other.
    """
    return [p for _, p in named_parameters(params) if p.requires_grad and p.is_floating_point()]


def average_parameters_or_parameter_groups(params: Params, process_group: dist.ProcessGroup | None) -> None:
    """Average the parameters of a model, named or not, or those of an optimizer's parameter groups."""
    if dist.get_rank(process_group) < 0:
        return
    chosen = [(n, p) for n, p in named_parameters(params) if p.requires_grad and p.is_floating_point()]
    _meeting(process_group).average(dict(chosen))


def named_parameters(params: Params) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each parameter once, with the name it was given, or else its place."""
    seen: set[int] = set()
    for name, p in _each(params):
        if id(p) not in seen:
            seen.add(id(p))
            yield name, p


def _each(params: Params) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for place, entry in enumerate(params):
        if isinstance(entry, torch.nn.Parameter):
            yield f"parameter {place}", entry
        elif isinstance(entry, Mapping):
            names = entry.get("param_names") or [f"group {place} parameter {i}" for i in range(len(entry["params"]))]
            yield from zip(names, entry["params"], strict=True)
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.nn.Parameter):
            yield entry
        else:
            raise NotImplementedError(
                f"Parameter input of type {type(entry)} is not supported: give model.parameters(), "
                "model.named_parameters() or optimizer.param_groups."
            )


class _Meeting:
    """The workers of one group, and what they have agreed to average."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.queue = CollectiveQueue(group, Ledger(), share=True)
        self._agreed: dict[str, str] | None = None

    def average(self, named: Mapping[str, Tensor]) -> None:
        facts = parameter_facts(named.items())
        changed = torch.tensor([float(facts != self._agreed)])
        # A worker whose parameters changed must not be alone in asking; so all hear of it first, in 4 bytes.
        average_in_place(self.queue, {"changed": changed}, "control")
        if float(changed) > 0:
            agree(self.queue, "what is averaged", facts)
            self._agreed = facts
        average_in_place(self.queue, {name: p.detach() for name, p in named.items()})


_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Meeting] = weakref.WeakKeyDictionary()


def _meeting(group: dist.ProcessGroup | None) -> _Meeting:
    group = group_or_world(group)
    if group not in _meetings:
        _meetings[group] = _Meeting(group)
    return _meetings[group]
