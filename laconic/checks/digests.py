"""Digests of tensors: 64 bits that change with any bit, and when two elements swap places."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_ROW = 1024
_MIX = -7046029254386353131  # 2^64 / the golden ratio, as int64


def digest(t: Tensor) -> Tensor:
    """Hash the bytes of a tensor to one int64, on its own device.

    The bytes form a table of 64-bit words. Sums over its rows and over its columns are weighted by their index, so two
    words that swap places change a row's sum or a column's. Two passes over memory.

    >>> a, b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 1.0, 3.0])
    >>> bool(digest(a) == digest(a.clone())), bool(digest(a) == digest(b))
    (True, False)
    """
    data = t.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // (8 * _ROW) * (8 * _ROW)
    total = torch.full((), data.numel(), dtype=torch.int64, device=t.device)
    if whole:
        table = _words(data[:whole]).view(-1, _ROW)
        total = total + _weighted(table.sum(1)) + _weighted(table.sum(0)) * _MIX
    rest = data[whole:]
    words = rest.numel() // 8 * 8
    return total + _weighted(_words(rest[:words])) * 3 + _weighted(rest[words:].to(torch.int64)) * 5


def digests(tensors: Mapping[str, Tensor]) -> Tensor:
    """Stack the digests of many tensors: int64 [tensors]."""
    return torch.stack([digest(t) for t in tensors.values()]) if tensors else torch.zeros(0, dtype=torch.int64)


def combined(each: Tensor) -> Tensor:
    """Combine many digests into one."""
    return _weighted(each)


def _words(data: Tensor) -> Tensor:
    if data.storage_offset() % 8:  # a view of 64-bit words must start at a multiple of 8 bytes
        data = data.clone()
    return data.view(torch.int64)


def _weighted(words: Tensor) -> Tensor:
    place = torch.arange(1, words.numel() + 1, dtype=torch.int64, device=words.device)
    mixed = words * ((place * _MIX) | 1)
    return (mixed ^ (mixed >> 29)).sum()
