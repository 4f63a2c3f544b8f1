"""States for tests, and whether two of them are the same, bit for bit."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from laconic.checkpoint.state import AS_BYTES, NATIVE_DTYPES, as_bytes


def same(a: Any, b: Any) -> bool:
    """Whether two states have the same types, keys in the same order, numbers, and tensors to the last bit."""
    if isinstance(a, Tensor):
        return (
            isinstance(b, Tensor)
            and a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(as_bytes(a), as_bytes(b))
        )
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
            and all(same(a[key], b[key]) for key in a)
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    return bool(a == b)


def rich() -> dict[str, Any]:
    """Everything that a state may hold."""
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=generator)
    dtypes = [dtype for dtype in (NATIVE_DTYPES | AS_BYTES).values() if dtype not in (torch.bool, torch.complex32)]
    return {
        "dtypes": {str(dtype): data.view(dtype).view(2, -1) for dtype in dtypes},
        "bool": data.view(8, 8) > 128,
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "empty complex": torch.empty(2, 0, dtype=torch.complex128),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "strided": torch.arange(20)[::3],
        "one of many": torch.arange(20.0)[::20],
        "one complex": torch.ones(5, dtype=torch.complex64)[::5],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 4),
        "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative bit": torch.tensor([1 + 2j]).conj().imag,
        "special": torch.tensor([math.nan, math.inf, -0.0, 1e-45]),
        "shared": [data, data, data[8:24], data[:16]],
        "parameter": torch.nn.Parameter(torch.arange(3.0)).detach(),
        "generator": generator.get_state(),
        "plain": [None, True, False, 0, -1, 2**100, 0.1, -0.0, 5e-324, math.nan, math.inf, -math.inf, "", "text"],
        "tuple": ((), (1, (2.0, [3])), [()]),
        "nothing": {},
        "long": 1 << 5000,
        "numbered": {0: {"step": torch.tensor(3.0)}, 1: {}, "0": "a string", -7: None},
    }


KEYS = [
    "",
    ".",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "layers.0.weight",
    "__metadata__",
    "con",
    "x" * 300,
    "nul\0byte",
    "line\nbreak",
    "żółć 🙂",
    "\ud800 lone surrogate",
    "step-00000001",
    "dict",
    "tensor",
    '"quoted"',
    "%s{}$(touch canary)",
]
"""Keys that would be dangerous as file names."""
