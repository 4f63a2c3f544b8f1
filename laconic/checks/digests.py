"""Digests of tensors, by which workers compare what must be equal: a flipped bit on one of them is found.

A digest has 64 bits that change with any bit of the tensor, and when two elements swap places.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from laconic.checks.agreement import all_same, of_all_shards
from laconic.comm.queue import CollectiveQueue
from laconic.errors import DivergedError, names, outliers
from laconic.values import is_whole

EVERY_GRADIENT_STEPS = 100
"""How often weights are compared by default where gradients are averaged at every step."""

_ROW = 1024
_CPU_ROWS, _GPU_ROWS = 64, 1 << 14
"""Rows that are mixed at a time: they stay in a core's cache; a GPU needs work for all of its cores."""
_MIX = -7046029254386353131  # 2^64 / the golden ratio, as int64
_SHIFT = 29
"""No multiple of 8: the sign bits of two elements in a word must not fall on each other, and cancel."""
_LOW = (1 << 64 - _SHIFT) - 1


class DivergenceCheck:
    """Compares the workers' weights after every `every`-th synchronisation that leaves them equal."""

    def __init__(self, every: int | None) -> None:
        if every is not None and not is_whole(every, 0):
            raise ValueError(
                f"attach(verify_every={every!r}): it must be a whole number of synchronisations, 0 for never, or None."
            )
        self.every = every
        self._count = 0

    def after_sync(
        self,
        queue: CollectiveQueue,
        shared: Mapping[str, Tensor],
        every_step: bool,
        step: int,
        shards: CollectiveQueue | None = None,
    ) -> None:
        """Count a synchronisation; if a comparison is due, raise `DivergedError` on all workers unless all are equal.

        `shared` is what the synchronisation has made equal: nothing, and it does not count, for an empty fragment, or
        one that is still in flight. `every_step` says whether each step is a synchronisation. "All workers" are also
        those that hold other `shards` of the same replicas.
        """
        if not shared:
            return
        self._count += 1
        every = self.every if self.every is not None else (EVERY_GRADIENT_STEPS if every_step else 1)
        if not every or queue.workers == 1 or self._count % every:
            return
        name, odd = next(iter(differences(queue, shared).items()), ("", []))
        each = "worker" if shards is None else "replica"
        if shards is not None:
            odd, name = of_all_shards(shards, odd, name, list(shared), queue.workers)
        if odd:
            raise DivergedError(
                f"after step {step}, {names(odd, each)} holds other weights than the rest, first in {name}, where all "
                "must be equal.\n  A bit may have flipped in memory, the hardware may differ between workers (then "
                "attach with verify_every=0), or other code writes to the weights. Go back to a checkpoint, or average "
                "them.",
                odd,
            )


def differences(queue: CollectiveQueue, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Find the tensors that are not the same on all workers, each with the workers that differ from the majority."""
    each = digests(tensors)
    if all_same(queue, combined(each)):
        return {}
    table = queue.gather(each)
    odd = {name: outliers(table[:, index].tolist())[1] for index, name in enumerate(tensors)}
    return {name: workers for name, workers in odd.items() if workers}


def digest(t: Tensor) -> Tensor:
    """Hash the bytes of a tensor to one int64, on its own device.

    The bytes form a table of 64-bit words. Each word is mixed with its column, and the sum of each row with its index:
    a mixed word changes with any bit, and differs from place to place.

    >>> a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    >>> bool(digest(a) == digest(a.clone())), bool(digest(a) == digest(b))
    (True, False)
    """
    data = _bytes(t)
    whole = data.numel() // (8 * _ROW) * (8 * _ROW)
    total = torch.full((), data.numel(), dtype=torch.int64, device=t.device)
    if whole:
        total = total + combined(_row_sums(_words(data[:whole]).view(-1, _ROW)))
    rest = data[whole:]
    words = rest.numel() // 8 * 8
    return total + combined(_words(rest[:words])) * 3 + combined(rest[words:].to(torch.int64)) * 5


def digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """Stack the digests of many tensors: int64 [tensors]."""
    return torch.stack([digest(t) for t in tensors.values()]) if tensors else torch.zeros(0, dtype=torch.int64)


def combined(each: Tensor) -> Tensor:
    """Combine many digests, or other 64-bit words, into one."""
    return _mixed(each).sum()


def _bytes(t: Tensor) -> Tensor:
    dense = t.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((t.numel(),), (1,)).view(torch.uint8)  # one element may have any stride


def _words(data: Tensor) -> Tensor:
    if data.storage_offset() % 8:  # a view of 64-bit words must start at a multiple of 8 bytes
        data = data.clone()
    return data.view(torch.int64)


def _row_sums(table: Tensor) -> Tensor:
    """Return the sum of the mixed words of each row, in little extra memory."""
    blocks = table.split(_CPU_ROWS if table.device.type == "cpu" else _GPU_ROWS)
    space = torch.empty((2, *blocks[0].shape), dtype=torch.int64, device=table.device)
    return torch.cat([_mixed(block, space[:, : len(block)]).sum(1) for block in blocks])


def _mixed(words: Tensor, space: Tensor | None = None) -> Tensor:
    """Map each word to another, one to one, by a function of its place in the last dimension.

    x ^ (x >> 29) and products with odd numbers are one-to-one. A product carries a changed bit upwards only, so
    high bits are added to low ones first: otherwise the signs of two elements could change without a trace. The shift
    must be logical: torch's is arithmetic, and its images of a number and of its complement are the same.
    """
    mixed, shifted = (None, None) if space is None else space.unbind()
    place = torch.arange(1, words.shape[-1] + 1, dtype=torch.int64, device=words.device)
    shifted = torch.bitwise_right_shift(words, _SHIFT, out=shifted)
    mixed = torch.bitwise_xor(words, shifted.bitwise_and_(_LOW), out=mixed)
    return mixed.mul_((place * _MIX) | 1)
