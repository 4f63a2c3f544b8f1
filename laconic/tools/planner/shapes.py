"""The model of a prediction: its shapes, and which of its tensors are sent together."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from laconic.cost import meta
from laconic.packing import in_buckets
from laconic.tools.errors import UsageError


@dataclass(frozen=True, eq=False)
class Shapes:
    """Trained tensors without memory, in the order of the forward pass.

    With `layers`, each layer is sent by itself as soon as its gradient is known; else in DDP's buckets of 25 MiB.
    `buffers` are those of the model, such as the statistics of BatchNorm.
    """

    tensors: Mapping[str, Tensor]
    layers: tuple[tuple[str, ...], ...] = ()
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Shapes:
        """Take the trained tensors and the buffers of a module."""
        return cls(meta(model), buffers=meta(model.named_buffers()))

    @cached_property
    def parameters(self) -> int:
        """The number of trained parameters."""
        return sum(t.numel() for t in self.tensors.values())

    def units(self, chosen: Mapping[str, Tensor]) -> list[list[str]]:
        """Divide some of the tensors into what is sent together, in the order of the forward pass."""
        if not self.layers:
            return in_buckets(chosen)
        units = [[name for name in layer if name in chosen] for layer in self.layers]
        return [unit for unit in units if unit]

    def before(self, names: Sequence[str]) -> float:
        """Return the share of the parameters that come before the first of these in the forward pass."""
        return min((self._starts[name] for name in names), default=self.parameters) / max(1, self.parameters)

    @cached_property
    def _starts(self) -> dict[str, int]:
        """How many parameters come before each tensor in the forward pass."""
        return dict(zip(self.tensors, accumulate((t.numel() for t in self.tensors.values()), initial=0), strict=False))


def from_count(parameters: int, layers: int | None = None) -> Shapes:
    """Make the shapes of a transformer of so many parameters: matrices of its layers, and a vector of what is left.

    >>> made = from_count(1_000_003, layers=4)
    >>> made.parameters, [tuple(made.tensors[name].shape) for name in made.layers[0]]
    (1000003, [(432, 144), (144, 144), (576, 144), (144, 576), (1169,)])
    """
    count = layers or 12
    digits = len(str(count - 1))
    made: dict[str, Tensor] = {}
    groups = []
    for index in range(count):
        size = parameters // count + (index < parameters % count)
        width = math.isqrt(size // 12)
        shapes = {
            "qkv": (3 * width, width),
            "merge": (width, width),
            "up": (4 * width, width),
            "down": (width, 4 * width),
        }
        names = {f"layer{index:0{digits}}.{kind}": shape for kind, shape in shapes.items() if width}
        rest = size - 12 * width * width
        vector = {f"layer{index:0{digits}}": (rest,)} if rest else {}
        made |= meta({**names, **vector})
        groups.append((*names, *vector))
    return Shapes(made, tuple(group for group in groups if group) if layers else ())


def adapters(base: Shapes, trainable: int) -> Shapes:
    """Make the shapes of adapters on the matrices of a frozen model: of each [m, n], a [rank, n] and an [m, rank].

    Their rank is the largest at which they have at most so many numbers; a vector has what is left.

    >>> made = adapters(from_count(1_000_000, layers=2), trainable=100_000)
    >>> made.parameters, [tuple(t.shape) for t in made.tensors.values()][:4]
    (100000, [(15, 204), (612, 15), (15, 204), (204, 15)])
    """
    matrices = {name: t.shape for name, t in base.tensors.items() if t.dim() > 1}
    rank = trainable // max(1, sum(m + n for m, n in matrices.values()))
    made: dict[str, Sequence[int]] = {}
    if rank:
        for name, (m, n) in matrices.items():
            made |= {f"{name}.A": (rank, n), f"{name}.B": (m, rank)}
    if rest := trainable - rank * sum(m + n for m, n in matrices.values()):
        made["rest"] = (rest,)
    return Shapes(meta(made))


def from_module(place: str) -> Shapes:
    """Build `module:function()` on the meta device, and take its trained parameters."""
    rule = "It is called without arguments, and must return an nn.Module"
    with torch.device("meta"):
        model = made_by(place, rule)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {place}: it returned {type(model).__name__}. {rule}.")
    return Shapes.of(model)


def made_by(place: str, rule: str) -> Any:
    """Call the "module:function" of --model; the `rule` ends the error of a mistake.

    Modules of the current folder are found, too, from now on.
    """
    module, _, name = place.partition(":")
    if not (module and name):
        raise UsageError(f"--model {place}: write module:function, such as train:make_model. {rule}.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return getattr(importlib.import_module(module), name)()
    except Exception as error:
        raise UsageError(f"--model {place}: {type(error).__name__}: {error}. {rule}.") from error
