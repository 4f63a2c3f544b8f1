"""Averaging tensors in place: the one routine behind weights rounds and model averagers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from laconic.buckets import in_buckets, same_memory
from laconic.codecs import Exact
from laconic.wires.group import Conductor
from laconic.wires.wire import Exchange


def average_in_place(conductor: Conductor, tensors: Mapping[str, Tensor], phase: str = "weights") -> None:
    """Replace each tensor by its mean over the workers, bucket by bucket, and wait for it.

    Tensors keep their storage, strides and dtype; each dtype travels by itself; sums are taken wide, so that equal
    replicas stay bit-equal. At most two buckets of extra memory are used.
    """
    run_all(conductor, [mean_of({n: tensors[n] for n in names}) for names in in_buckets(tensors)], phase)


def mean_of(tensors: Mapping[str, Tensor]) -> Exchange:
    """Average one bucket, exactly, and write the means over it."""
    return written(Exact(wide=True).average(tensors, {}), tensors)


def written(exchange: Exchange, into: Mapping[str, Tensor]) -> Exchange:
    """Let an exchange end by writing its means over `into`."""
    end = yield from exchange
    write(into, end.mean)
    return end


def write(into: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values over tensors of the same names, unless they are there already."""
    moved = [name for name, t in into.items() if t is not values[name] and not same_memory(t, values[name])]
    if moved:
        with torch.no_grad():
            torch._foreach_copy_([into[name] for name in moved], [values[name] for name in moved])


def run_all(conductor: Conductor, exchanges: Iterable[Exchange], phase: str) -> None:
    """Run exchanges together, and wait for all of them."""
    nothing = torch.empty(0)
    futures = [conductor.submit(exchange, phase, nothing) for exchange in exchanges]
    conductor.flush()
    for future in futures:
        future.wait()
