"""What a codec may request from the network.

A codec does no I/O. It is a generator that yields a request, is sent the result, and ends with `Averaged`. The same
codec runs on a process group (`queue.py`), for K workers in one process (`lockstep.py`), and dry (`dry.py`).

A codec that keeps state asks at its end whether it may: `Decide`. All exchanges of a step get the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by the name of their parameter, never by position, bucket or address."""

State: TypeAlias = dict[str, Any]
"""What a codec keeps between exchanges: a tree of dicts, tensors and plain numbers."""


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of `x` over all workers, in `x`'s shape and dtype.

    The result may reuse the memory of `x`. With `wide`, workers that hold equal values get exactly these values back,
    whatever the number of workers and the dtype.
    """

    x: Tensor
    wide: bool = False


@dataclass(frozen=True, eq=False)
class Gather:
    """Every worker's `x`, stacked in the order of the workers: [workers, *x.shape]."""

    x: Tensor


@dataclass(frozen=True, eq=False)
class AllToAll:
    """Every worker's rows for this worker: [workers, rows for this worker, *x.shape[1:]].

    `x` holds `rows[0]` rows for the first worker, then `rows[1]` for the second, and so on. All workers give the same
    `rows`.
    """

    x: Tensor
    rows: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class First:
    """One worker's `x`, on all workers: that of the first, or of `worker`. The result may reuse the memory of `x`."""

    x: Tensor
    worker: int = 0


@dataclass(frozen=True, eq=False)
class Max:
    """The largest of every worker's `x`, element by element. The result may reuse the memory of `x`.

    For control data, such as headers: with gloo its packets grow with the number of workers, those of a `Gather` with
    its square.
    """

    x: Tensor


@dataclass(frozen=True, eq=False)
class Rank:
    """Which worker this is, and how many there are, as a tensor of two numbers on the CPU. Nothing is sent."""


@dataclass(frozen=True, eq=False)
class Decide:
    """Whether the results of all exchanges of the step are finite, as a 0-d tensor; the last request of an exchange.

    `ok` says it of this exchange: a 0-d tensor, zero for no. Nothing is sent: every worker knows the same results. A
    codec changes its state only if the answer is true. The answer comes when the caller has submitted the last exchange
    of the step.
    """

    ok: Tensor


Request: TypeAlias = Mean | Gather | AllToAll | First | Max
"""What is sent to other workers."""

_OPERATIONS: dict[type[Request], str] = {
    Mean: "all_reduce",
    Gather: "all_gather",
    AllToAll: "all_to_all",
    First: "broadcast",
    Max: "all_reduce",
}


@dataclass(frozen=True, eq=False)
class Averaged:
    """The result of an exchange.

    `mean` is the same on every worker, bit for bit. `own()` is what this worker's own messages amount to; over all
    workers, the own parts average to the mean. `finite()` is a 0-d bool tensor: whether the mean is free of NaN and
    Inf, and so the same on every worker. `own` and `finite` cost a pass over memory and are computed on request.
    If the exchange has asked `Decide`, it is `decided`, and `finite()` is the answer.
    """

    mean: dict[str, Tensor]
    own: Callable[[], dict[str, Tensor]]
    finite: Callable[[], Tensor]
    decided: bool = False


Exchange: TypeAlias = Generator[Request | Decide | Rank, Tensor, Averaged]


def gather(x: Tensor) -> Exchange:
    """Gather `x` from every worker, as an exchange: the rows are `mean[""]`, on the CPU."""
    rows = yield Gather(x)
    return Averaged({"": rows.cpu()}, dict, true)


def rank_of(worker: int, workers: int) -> Tensor:
    """The answer to `Rank`."""
    return torch.tensor([worker, workers])


def by_itself(exchange: Exchange) -> Generator[Request | Rank, Tensor, Averaged]:
    """Run an exchange that keeps its state if its own result is finite, and takes no part in what others decide."""
    answer: Tensor | None = None
    while True:
        try:
            request = exchange.send(answer)  # type: ignore[arg-type]  # the first send starts it, with None
        except StopIteration as stop:
            end: Averaged = stop.value
            return replace(end, decided=True)
        answer = request.ok if isinstance(request, Decide) else (yield request)


def all_true(flags: Sequence[Tensor]) -> Tensor:
    """Return whether all 0-d tensors are nonzero, without waiting for an accelerator; the only one there, as it is."""
    there = [flag for flag in flags if flag.device.type != "cpu"]
    here = all(bool(flag) for flag in flags if flag.device.type == "cpu")
    if not there:
        return torch.tensor(here)
    if not here:
        return torch.zeros_like(there[0])
    return there[0] if len(there) == 1 else torch.stack([flag.bool() for flag in there]).all()


def true() -> Tensor:
    """Return a 0-d tensor that is True: the `finite` of a result that cannot be otherwise."""
    return torch.tensor(True)


def describe(request: Request) -> str:
    """Format a request for error messages.

    >>> describe(Mean(torch.zeros(12, 8)))
    'Mean[12, 8]'
    """
    return f"{type(request).__name__}{list(request.x.shape)}"


def operation(request: Request) -> str:
    """Return the collective that serves `request`, as the ledger names it."""
    return _OPERATIONS[type(request)]


def payload_bytes(request: Request) -> int:
    """Count the bytes that one worker passes to the collective."""
    return request.x.numel() * request.x.element_size()


def own_bytes(request: Request, worker: int) -> int | None:
    """Count the bytes of an all_to_all that stay with `worker`; None for other collectives."""
    if not isinstance(request, AllToAll):
        return None
    return payload_bytes(request) // max(1, sum(request.rows)) * request.rows[worker]


def all_finite(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return, in one pass, a 0-d bool tensor: whether no tensor holds NaN or Inf.

    A sum is non-finite as soon as one of its terms is, and costs a twentieth of `isfinite(x).all()` on a CPU.
    """
    sums = [total(t) for t in tensors.values()]
    if not sums:
        return true()
    # On a GPU the number of kernel launches decides the cost.
    ok = sums[0].isfinite() if len(sums) == 1 else torch.stack([s.to(sums[0].dtype) for s in sums]).isfinite().all()
    if ok.device.type == "cpu" and not bool(ok):  # a sum may overflow though all terms are finite
        return torch.stack([t.isfinite().all() for t in tensors.values()]).all()
    return ok


def total(x: Tensor) -> Tensor:
    """Sum `x` in fp32 or wider: half precision would overflow."""
    return x.sum(dtype=torch.float32 if x.element_size() < 4 else None)
