"""The same test over torch's modules and the twin's.

A row of the table of defects is one test, decorated with what torch shows in it:

    @defect(torch_shows="the residual grew")
    def test_d01_the_residual_stays_bounded(implementation): ...

Over the twin it must pass. Over torch, in the nightly part, it must fail, with that text: so the table in
`docs/twin.md` stays true, and a torch that has learnt better is noticed.
"""

from __future__ import annotations

import functools
import importlib
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

PACKAGES = {"torch": "torch.distributed.algorithms", "laconic": "laconic.algorithms"}


def module(implementation: str, name: str) -> Any:
    """Import `name` of one implementation, such as `ddp_comm_hooks.powerSGD_hook`; torch keeps `optim` elsewhere."""
    package = "torch.distributed" if (implementation, name) == ("torch", "optim") else PACKAGES[implementation]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"{package}.{name}")


def power(implementation: str) -> Any:
    return module(implementation, "ddp_comm_hooks.powerSGD_hook")


def post_local(implementation: str) -> Any:
    return module(implementation, "ddp_comm_hooks.post_localSGD_hook")


def averagers(implementation: str) -> Any:
    return module(implementation, "model_averaging.averagers")


def hierarchical(implementation: str) -> Any:
    return module(implementation, "model_averaging.hierarchical_model_averager")


def averaging(implementation: str) -> Any:
    return module(implementation, "model_averaging.utils")


def defect(torch_shows: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test over the twin, where it must pass, and over torch, where it must fail with `torch_shows`."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def row(implementation: str, **arguments: Any) -> None:
            if implementation == "laconic":
                test(implementation, **arguments)
                return
            with pytest.raises(AssertionError, match=torch_shows):
                test(implementation, **arguments)

        over: Callable[[Callable[..., None]], Callable[..., None]] = pytest.mark.parametrize(
            "implementation", ["laconic", pytest.param("torch", marks=pytest.mark.nightly)]
        )
        return over(row)

    return decorate


class Given(nn.Module):
    """A model whose gradients are given: `forward(gradients)` is their product with the parameters."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros_like(t) for t in like])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum().double() for p, g in zip(self.weights, gradients, strict=True)]).sum()


def averages(state: Any, hook: Any, steps: Iterable[Sequence[Tensor]], **ddp: Any) -> Iterator[list[Tensor]]:
    """Send given gradients, step by step, through `hook`, and yield each step's average."""
    model = None
    for gradients in steps:
        if model is None:
            model = DDP(Given(gradients), **ddp)
            model.register_comm_hook(state, hook)
        model.zero_grad()
        model(gradients).backward()
        yield [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def averaged(state: Any, hook: Any, steps: Iterable[Sequence[Tensor]], **ddp: Any) -> list[Tensor]:
    """Return the last step's average."""
    return list(averages(state, hook, steps, **ddp))[-1]


def mean_of(tensor: Tensor) -> Tensor:
    """Average over the workers, in float64."""
    total = tensor.detach().double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def saved_and_loaded(value: Any) -> Any:
    """Through a file, as `torch.load(weights_only=True)` reads it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@dataclass
class Collectives:
    """Counts what Python code hands to torch.distributed: elements of each all-reduce, bytes of all collectives."""

    numels: list[int]
    sizes_bytes: list[int]

    @classmethod
    def watch(cls) -> Collectives:
        """Begin to count, for the rest of this process."""
        seen = cls([], [])
        for name, place in {"all_reduce": 0, "all_to_all_single": 1, "all_gather": 1}.items():
            setattr(dist, name, seen._counted(getattr(dist, name), place, name == "all_reduce"))
        return seen

    def _counted(self, plain: Callable[..., Any], place: int, reduces: bool) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            if reduces:
                self.numels.append(args[place].numel())
            self.sizes_bytes.append(args[place].numel() * args[place].element_size())
            return plain(*args, **kwargs)

        return collective
