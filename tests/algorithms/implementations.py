"""Run the same test with torch's modules and with the twin's, and train small models in it.

Each row of the table of defects in `docs/twin.md` is one test, decorated with the error that torch shows:

    @defect(torch_shows="the residual grew")
    def test_d01_the_residual_stays_bounded(implementation): ...

With the twin it must pass. With torch, in the nightly tests, it must fail with that text. So the table stays true, and
a version of torch without the defect is noticed.
"""

from __future__ import annotations

import functools
import importlib
import io
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.session.models import batch

PACKAGES = {"torch": "torch.distributed.algorithms", "laconic": "laconic.algorithms"}


def module(implementation: str, name: str) -> Any:
    """Import `name` of one implementation, such as `ddp_comm_hooks.powerSGD_hook`. torch has `optim` elsewhere."""
    package = "torch.distributed" if (implementation, name) == ("torch", "optim") else PACKAGES[implementation]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"{package}.{name}")


power = functools.partial(module, name="ddp_comm_hooks.powerSGD_hook")
post_local = functools.partial(module, name="ddp_comm_hooks.post_localSGD_hook")
averagers = functools.partial(module, name="model_averaging.averagers")
hierarchical = functools.partial(module, name="model_averaging.hierarchical_model_averager")
averaging = functools.partial(module, name="model_averaging.utils")


def defect(torch_shows: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with the twin, where it must pass, and with torch, where it must fail with `torch_shows`."""

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


def hooked(net: nn.Module, state: Any, hook: Any, **ddp: Any) -> DDP:
    """Wrap a module in DDP with a communication hook."""
    model = DDP(net, **ddp)
    model.register_comm_hook(state, hook)
    return model


def sgd(model: nn.Module, lr: float = 0.2, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def train(
    model: nn.Module, optimizer: Any, worker: int, steps: Iterable[int], averager: Any = None, **data: int
) -> list[float]:
    """Train on this worker's batches of `steps`, and return the losses. Without an optimizer, only run backward."""
    dtype = next(model.parameters()).dtype
    losses = []
    for step in steps:
        x, y = batch(worker, step, **data)
        (optimizer or model).zero_grad()
        loss = F.cross_entropy(model(x.to(dtype)), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if optimizer is not None:
            optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
    return losses


class ReverseOrder(nn.Module):
    """Layers used in the reverse order of their registration, so that DDP rebuilds its buckets in another layout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.middle, self.first = nn.Linear(40, 4), nn.Linear(48, 40), nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))
        return result


class GivenGradients(nn.Module):
    """A model with given gradients: `forward(gradients)` is their product with the parameters."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros_like(t) for t in like])

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum().double() for p, g in zip(self.weights, gradients, strict=True)]).sum()


def averages(state: Any, hook: Any, steps: Iterable[Sequence[Tensor]], **ddp: Any) -> Iterator[list[Tensor]]:
    """Average given gradients through `hook`, and yield the result of each step."""
    model = None
    for gradients in steps:
        model = model or hooked(GivenGradients(gradients), state, hook, **ddp)
        model.zero_grad()
        model(gradients).backward()
        yield [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def averaged(state: Any, hook: Any, steps: Iterable[Sequence[Tensor]], **ddp: Any) -> list[Tensor]:
    """Return the result of the last step."""
    return list(averages(state, hook, steps, **ddp))[-1]


def mean_of(tensor: Tensor) -> Tensor:
    """Average over the workers, in float64."""
    total = tensor.detach().double().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def power_state(implementation: str, **settings: Any) -> Any:
    """Make a `PowerSGDState` that compresses from the third step on."""
    return power(implementation).PowerSGDState(None, **{"start_powerSGD_iter": 2, **settings})


def drawn(seed: str, *shape: int) -> Tensor:
    """Return random numbers that depend on `seed` only, not on the worker."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(seed.encode())))


def relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).norm() / right.double().norm())


def saved_and_loaded(value: Any) -> Any:
    """Save to a file, and load it with `torch.load(weights_only=True)`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@dataclass
class Collectives:
    """Elements of each all_reduce and bytes of each collective that Python code passes to torch.distributed."""

    numels: list[int]
    sizes_bytes: list[int]

    @classmethod
    def watch(cls) -> Collectives:
        """Count from now on, until the process ends."""
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
