"""What a codec may ask of the network.

A codec does no I/O. It is a generator that yields a request, is sent the answer, and ends with `Averaged`.
Whoever drives it owns the network: a process group (`group.py`), K workers in this process (`lockstep.py`)
or nobody at all (`dry.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by the name of their parameter: never by position, bucket or address."""

State: TypeAlias = dict[str, Any]
"""What a codec remembers between rounds: a nest of dicts, tensors and plain numbers."""


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of `x` over all workers, in `x`'s shape and dtype.

    `x` is given away: the answer may be the same memory, overwritten. With `wide`, the sum is taken in a wider
    type, so that workers with equal values get exactly these values back.
    """

    x: Tensor
    wide: bool = False


@dataclass(frozen=True, eq=False)
class Gather:
    """Every worker's `x`, stacked in the order of the workers: [workers, *x.shape]."""

    x: Tensor


class Part(Protocol):
    """Numbers of one dtype that travel together."""

    @property
    def dtype(self) -> torch.dtype:
        """What they are."""
        ...

    @property
    def nbytes(self) -> int:
        """How much travels."""
        ...

    @property
    def copied(self) -> bool:
        """Whether they must be copied to be one flat tensor."""
        ...

    def open(self) -> Tensor:
        """Return them as one flat tensor: in their own memory, or in a copy."""
        ...

    def close(self, mean: Tensor) -> None:
        """Take the mean, in the memory that `open` returned."""
        ...


@dataclass(frozen=True, eq=False)
class Whole:
    """A part that is one flat tensor, averaged where it is."""

    x: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """What it holds."""
        return self.x.dtype

    @property
    def nbytes(self) -> int:
        """How much travels."""
        return self.x.nbytes

    @property
    def copied(self) -> bool:
        """Say no."""
        return False

    def open(self) -> Tensor:
        """Return it."""
        return self.x

    def close(self, mean: Tensor) -> None:
        """Do nothing: the mean is there."""


@dataclass(frozen=True, eq=False)
class Means:
    """The means of many parts over all workers, each closed with its own. The answer is empty.

    Workers with equal values get exactly these values back.
    """

    parts: Sequence[Part]


Request: TypeAlias = Mean | Gather
"""What a codec asks."""

Question: TypeAlias = Request | Means
"""What a wire is asked."""


@dataclass(frozen=True, eq=False)
class Averaged:
    """What an exchange ends with.

    `mean` is what every worker received, the same bits everywhere. `own()` is what this worker's own messages
    amounted to; over all workers, the own parts average to the mean. `finite()` is a 0-d bool tensor: whether
    the mean is free of NaN and Inf, and so the same answer on every worker. The last two cost a pass over
    memory and are computed when asked for.
    """

    mean: dict[str, Tensor]
    own: Callable[[], dict[str, Tensor]]
    finite: Callable[[], Tensor]


Exchange: TypeAlias = Generator[Request, Tensor, Averaged]
Questions: TypeAlias = Generator[Question, Tensor, Averaged]
"""An exchange, or one that asks for more than codecs do."""


def describe(request: Question) -> str:
    """Name a request the way that errors print it.

    >>> describe(Mean(torch.zeros(12, 8)))
    'Mean[12, 8]'
    """
    if isinstance(request, Means):
        return f"Means[{len(request.parts)} parts, {payload_bytes(request)} bytes]"
    return f"{type(request).__name__}{list(request.x.shape)}"


def operation(request: Question) -> str:
    """Name the collective that answers `request`, as the ledger calls it."""
    return "all_gather" if isinstance(request, Gather) else "all_reduce"


def payload_bytes(request: Question) -> int:
    """Count the bytes that one worker hands to the collective."""
    if isinstance(request, Means):
        return sum(part.nbytes for part in request.parts)
    return request.x.numel() * request.x.element_size()


def is_finite(x: Tensor) -> bool:
    """Tell whether a tensor holds neither NaN nor Inf, in one pass, and wait for it.

    >>> is_finite(torch.full((2,), 3e38)), is_finite(torch.tensor([1.0, torch.nan]))
    (True, False)
    """
    return math.isfinite(_sum(x).item()) or bool(x.isfinite().all())


def all_finite(tensors: Mapping[str, Tensor]) -> Tensor:
    """Tell in one pass, as a 0-d bool tensor, whether no tensor holds NaN or Inf.

    A sum is non-finite as soon as one of its terms is, and costs a twentieth of `isfinite(x).all()` on a CPU.
    """
    sums = [_sum(t) for t in tensors.values()]
    if not sums:
        return torch.tensor(True)
    # On a GPU what counts is how few calls there are.
    ok = sums[0].isfinite() if len(sums) == 1 else torch.stack([s.to(sums[0].dtype) for s in sums]).isfinite().all()
    if ok.device.type == "cpu" and not bool(ok):  # a sum may overflow though no term has
        return torch.stack([t.isfinite().all() for t in tensors.values()]).all()
    return ok


def _sum(x: Tensor) -> Tensor:
    """Add up in fp32 at least: half precision would overflow."""
    return x.sum(dtype=torch.float32 if x.element_size() < 4 else None)
