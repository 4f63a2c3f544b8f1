"""Outer steps: how the mean changes the weights.

At the end of a round every worker holds the same anchor (the weights after the last round) and the same mean delta
(anchor − weights, which acts as a gradient). The outer step computes the next anchor from both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from math import inf
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.exchange import State, Tensors
from laconic.values import as_code, is_number

_REST = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@runtime_checkable
class Outer(Protocol):
    """The step that follows a round of weights."""

    @property
    def adopts(self) -> bool:
        """Whether the mean of the weights becomes the weights, so that exact averaging needs no anchor."""
        ...

    def step(self, anchor: dict[str, Tensor], delta: Tensors, state: State) -> None:
        """Update `anchor` in place from the mean `delta`. `state` is kept between rounds, by parameter name."""
        ...


@dataclass(frozen=True, repr=False)
class Nesterov:
    """Gradient descent on the deltas with Nesterov momentum, as in DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

    v ← momentum · v + delta;  anchor ← anchor − lr · (delta + momentum · v).  `Nesterov(lr=1, momentum=0)`, the default
    of a plan, is plain averaging: every worker takes the mean of the weights.
    """

    lr: float = 0.7
    momentum: float = 0.9

    __repr__ = as_code

    def __post_init__(self) -> None:
        values: list[tuple[str, object, float]] = [("lr", self.lr, inf), ("momentum", self.momentum, 1.0)]
        for name, value, limit in values:
            if not (is_number(value) and 0 <= value < limit):  # type: ignore[operator]
                rule = "a number from 0 up" if name == "lr" else "a number from 0 to below 1"
                raise ValueError(
                    f"Nesterov({name}={value!r}): {name} must be {rule}. DiLoCo uses lr=0.7, momentum=0.9."
                )

    @property
    def adopts(self) -> bool:
        """True for lr=1 and momentum=0."""
        return self.lr == 1 and self.momentum == 0

    def step(self, anchor: dict[str, Tensor], delta: Tensors, state: State) -> None:
        """Apply the mean delta and the momentum of earlier rounds."""
        for name, d in delta.items():
            a = anchor[name]
            d = d.to(a.dtype)
            if self.momentum:  # without it, no state is kept
                velocity: dict[str, Tensor] = state.setdefault("velocity", {})
                if name not in velocity:
                    velocity[name] = torch.zeros_like(a)
                velocity[name].mul_(self.momentum).add_(d)
                d = d.add(velocity[name], alpha=self.momentum)
            a.sub_(d, alpha=self.lr)


@dataclass(frozen=True, repr=False)
class Optim:
    """Any optimizer of torch.optim, by name or as a class, on the deltas: `Optim("AdamW", {"lr": 0.1})`.

    Other optimizer classes work too, but a plan with one cannot be parsed from its text.
    """

    optimizer: str | type[Optimizer]
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    __repr__ = as_code

    def __post_init__(self) -> None:
        if isinstance(self.optimizer, type) and getattr(torch.optim, self.optimizer.__name__, None) is self.optimizer:
            object.__setattr__(self, "optimizer", self.optimizer.__name__)
        if not isinstance(self.options, Mapping):
            raise ValueError(
                f"Optim(options={self.options!r}): options are the optimizer's keywords, such as {{'lr': 0.1}}."
            )
        object.__setattr__(self, "options", dict(self.options))
        made = self._make([torch.zeros(1, requires_grad=True)])  # what it refuses, it refuses here
        if isinstance(made, torch.optim.SparseAdam):
            raise ValueError(
                f"Optim({self.optimizer!r}): it takes only sparse gradients, and mean deltas are dense. Choose "
                'another, such as "Adam".'
            )
        takes = signature(made.step).parameters.values()
        needed = [each.name for each in takes if each.default is each.empty and each.kind not in _REST]
        if needed:
            raise ValueError(
                f"Optim({self.optimizer!r}): its step needs {needed[0]}, and an outer step has only the mean deltas, "
                'no loss to compute again. Choose an optimizer whose step takes no argument, such as "SGD" or "AdamW".'
            )

    @property
    def adopts(self) -> bool:
        """False."""
        return False

    def step(self, anchor: dict[str, Tensor], delta: Tensors, state: State) -> None:
        """Step the optimizer on the anchors, with the mean deltas as their gradients."""
        names, known = list(delta), state.setdefault("optim", {})
        # 1. An optimizer of these anchors alone, with the state that earlier rounds kept for them.
        optimizer = self._make([anchor[name] for name in names])
        for name in names:
            anchor[name].grad = delta[name].to(anchor[name].dtype)
            if name in known:
                optimizer.state[anchor[name]] = dict(known[name])
        # 2. Its step. The anchors keep no gradients.
        try:
            optimizer.step()
        finally:
            for name in names:
                anchor[name].grad = None
        # 3. State is kept by name: fragments step one by one, and anchors may be new tensors in the next round.
        for name in names:
            known[name] = dict(optimizer.state[anchor[name]])

    def _make(self, params: list[Tensor]) -> Optimizer:
        kind = self.optimizer if isinstance(self.optimizer, type) else getattr(torch.optim, self.optimizer, None)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)) or kind is Optimizer:
            raise ValueError(
                f"Optim({self.optimizer!r}): there is no such optimizer in torch.optim. Give its name, "
                'such as "SGD", or a class.'
            )
        try:
            return kind(params, **self.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self!r}: torch.optim.{kind.__name__} refuses these options: {error}") from error
