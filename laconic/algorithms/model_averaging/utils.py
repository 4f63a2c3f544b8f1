"""Averaging of parameters and parameter groups. The twin of torch's module.

Differences from torch: parameters are averaged in place and keep storage, strides and dtype. Those without a gradient
are averaged too. Equal replicas stay bit-equal. Workers that pass different parameters raise an error.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.engine import group_or_world
from laconic.checks.agreement import agree, parameter_facts
from laconic.comm.averaging import average_in_place
from laconic.comm.queue import CollectiveQueue
from laconic.ledger import Ledger

__all__ = ["average_parameters", "average_parameters_or_parameter_groups", "get_params_to_average"]

Params = Iterable[torch.nn.Parameter] | Iterable[tuple[str, torch.nn.Parameter]] | Iterable[dict[str, Any]]


def average_parameters(params: Iterator[torch.nn.Parameter], process_group: dist.ProcessGroup | None) -> None:
    """Replace each parameter by its mean over the workers of `process_group`. Other workers do nothing."""
    _average({f"parameter {index}": p for index, p in enumerate(params)}, process_group)


def get_params_to_average(params: Params) -> list[torch.nn.Parameter]:
    """Return the parameters to average: those that are trained and have a floating-point dtype."""
    return [p for _, p in _trained_parameters(params)]


def average_parameters_or_parameter_groups(params: Params, process_group: dist.ProcessGroup | None) -> None:
    """Average the parameters of a model, with or without names, or those of an optimizer's parameter groups."""
    _average(dict(_trained_parameters(params)), process_group)


def _average(named: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    if dist.get_rank(group) >= 0:
        group = group_or_world(group)
        if group not in _averagers:
            _averagers[group] = _GroupAverager(group)
        _averagers[group].average(named)


def _trained_parameters(params: Params) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the trained floating-point parameters with their names, each parameter once."""
    unique: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, p in _named_parameters(params):
        unique.setdefault(id(p), (name, p))
    return [(name, p) for name, p in unique.values() if p.requires_grad and p.is_floating_point()]


def _named_parameters(params: Params) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield all parameters, with the names that the caller gave them or else their indices."""
    for index, entry in enumerate(params):
        if isinstance(entry, torch.nn.Parameter):
            yield f"parameter {index}", entry
        elif isinstance(entry, Mapping):
            names = entry.get("param_names") or [f"group {index} parameter {i}" for i in range(len(entry["params"]))]
            yield from zip(names, entry["params"], strict=True)
        elif isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], torch.nn.Parameter):
            yield entry
        else:
            raise NotImplementedError(
                f"Parameter input of type {type(entry)} is not supported: give model.parameters(), "
                "model.named_parameters() or optimizer.param_groups."
            )


class _GroupAverager:
    """Averages parameters over one group, once the workers have agreed on names, shapes and dtypes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.queue = CollectiveQueue(group, Ledger(), share=True)
        self._agreed: dict[str, str] | None = None

    def average(self, named: Mapping[str, Tensor]) -> None:
        facts = parameter_facts(named.items())
        changed = torch.tensor([float(facts != self._agreed)], device=self.queue.device)
        # `agree` is collective, so all workers must know whether the parameters changed on any of them: 4 bytes.
        average_in_place(self.queue, {"changed": changed}, "control")
        if float(changed) > 0:
            agree(self.queue, "what is averaged", facts)
            self._agreed = facts
        average_in_place(self.queue, {name: p.detach() for name, p in named.items()})


_averagers: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupAverager] = weakref.WeakKeyDictionary()
