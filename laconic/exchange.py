"""The vocabulary of communication: what may be requested from other workers, and how a generator of requests is run.

An exchange does no I/O. It is a generator that yields a request, is sent the result, and returns what it found; the
exchange of a codec returns `Averaged`. The same exchange runs on a process group (`comm/queue.py`), for K workers in
one process (`comm/lockstep.py`), and dry (`comm/dry.py`).

A codec that keeps state asks at its end whether it may: `Decide`. All exchanges of a step get the same answer.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

Tensors: TypeAlias = Mapping[str, Tensor]
"""Tensors by the name of their parameter, never by position, bucket or address."""

State: TypeAlias = dict[str, Any]
"""What a codec keeps between exchanges: a tree of dicts, tensors and plain numbers."""

T = TypeVar("T")


@dataclass(frozen=True)
class Peers:
    """The workers of an exchange, as seen by one of them: its index among them, and how many they are."""

    rank: int
    size: int


Level: TypeAlias = int | Literal["machine"] | None
"""Among whom: groups of so many workers, the workers of one machine, or all (None)."""


def level_name(level: Level) -> str:
    """Return how the ledger names a level.

    >>> level_name(None), level_name(2)
    ('world', 'groups of 2')
    """
    return "world" if level is None else f"groups of {level}" if isinstance(level, int) else level


def check_sizes(sizes: Sequence[int], workers: int) -> None:
    """Refuse groups, innermost first, into which so many workers cannot be divided, or of which the last is not all."""
    for size in sizes:
        if workers % size:
            raise ValueError(
                f"the plan asks for groups of {size}, and {workers} workers cannot be divided so. "
                f"Choose a size that divides {workers}."
            )
    if sizes and sizes[-1] != workers:
        raise ValueError(
            f"the plan's last groups have {sizes[-1]} workers, and there are {workers}. The last "
            f"level must be all of them: write {workers} there, or start {sizes[-1]} workers."
        )


@dataclass(frozen=True, eq=False)
class Mean:
    """The mean of `x` over all workers, in `x`'s shape and dtype.

    The result may reuse the memory of `x`. With `wide`, workers that hold equal values get exactly these values back,
    whatever the number of workers and the dtype. With `shares` it is the weighted mean: one for each worker, the same
    tuple on all of them, none below 0, and 1 on average. What a worker of share 0 holds is not looked at.
    """

    x: Tensor
    wide: bool = False
    shares: tuple[float, ...] | None = None


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
    """The result of a codec's exchange.

    `mean` is the same on every worker, bit for bit. `own()` is what this worker's own messages amount to; over all
    workers, these average to the mean. It is undefined after an exchange that could overwrite its input (`reuse`).
    `finite()` is a 0-d bool tensor: whether the mean is free of NaN and Inf, and so the same on every worker. `own` and
    `finite` cost a pass over memory and are computed on request. If the exchange has asked `Decide`, it is `decided`,
    and `finite()` is the answer.
    """

    mean: dict[str, Tensor]
    own: Callable[[], dict[str, Tensor]]
    finite: Callable[[], Tensor]
    decided: bool = False


Exchange: TypeAlias = Generator[Request | Decide, Tensor, T]
"""A generator of requests that returns a T. That of a codec is an `Exchange[Averaged]`."""


@dataclass(frozen=True, eq=False)
class Done(Generic[T]):
    """The end of an exchange, with what it returned."""

    result: T


def advance(exchange: Exchange[T], answer: Tensor | None) -> Request | Decide | Done[T]:
    """Send an exchange the answer to its last request, or None to start it; return its next request, or its end."""
    try:
        # The first send starts the generator: it must be None, whatever the annotation says.
        return exchange.send(answer)  # type: ignore[arg-type]
    except StopIteration as stop:
        return Done(stop.value)


def drive(exchange: Exchange[T], serve: Callable[[Request | Decide], Tensor]) -> T:
    """Run an exchange to its end, answering each request by `serve`.

    >>> drive(gather(torch.ones(2)), lambda request: torch.stack([request.x] * 3))
    tensor([[1., 1.],
            [1., 1.],
            [1., 1.]])
    """
    asked = advance(exchange, None)
    while not isinstance(asked, Done):
        asked = advance(exchange, serve(asked))
    return asked.result


def intercept(exchange: Exchange[T], see: Callable[[Request | Decide], Exchange[Tensor]]) -> Exchange[T]:
    """Run an exchange inside another: each request goes to `see`, a generator that returns the answer.

    `see` may pass the request on (`answer = yield request`), look at it and at its answer, or answer it itself.
    """
    asked = advance(exchange, None)
    while not isinstance(asked, Done):
        asked = advance(exchange, (yield from see(asked)))
    return asked.result


def by_itself(exchange: Exchange[Averaged]) -> Exchange[Averaged]:
    """Run an exchange that keeps its state if its own result is finite, and takes no part in what others decide."""
    asked = advance(exchange, None)
    while not isinstance(asked, Done):
        asked = advance(exchange, asked.ok if isinstance(asked, Decide) else (yield asked))
    return replace(asked.result, decided=True)


def gather(x: Tensor) -> Exchange[Tensor]:
    """Gather `x` from every worker, on the CPU: [workers, *x.shape]."""
    return (yield Gather(x)).cpu()


def largest(x: Tensor) -> Exchange[Tensor]:
    """Return the largest of every worker's `x`, element by element, on the CPU."""
    return (yield Max(x)).cpu()


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
    # In fp32 or wider: half precision would overflow.
    sums = [t.sum(dtype=torch.float32 if t.element_size() < 4 else None) for t in tensors.values()]
    if not sums:
        return true()
    if len(sums) == 1 and sums[0].device.type == "cpu":
        [x] = tensors.values()  # a sum may overflow though all terms are finite
        return torch.tensor(cmath.isfinite(sums[0].item()) or bool(x.isfinite().all()))
    # On a GPU the number of kernel launches decides the cost.
    ok = sums[0].isfinite() if len(sums) == 1 else torch.stack([s.to(sums[0].dtype) for s in sums]).isfinite().all()
    if ok.device.type == "cpu" and not bool(ok):  # a sum may overflow though all terms are finite
        return torch.stack([t.isfinite().all() for t in tensors.values()]).all()
    return ok
