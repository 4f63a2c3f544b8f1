"""The names that a saved `PowerSGDState` mentions. They are compared as text; nothing is looked up by them."""

from __future__ import annotations

POWER_SGD = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""torch's typed storages, and the dtype that each stands for."""

ALLOWED = frozenset(
    {
        f"{POWER_SGD}.PowerSGDState",
        f"{POWER_SGD}.powerSGD_hook",
        f"{POWER_SGD}.batched_powerSGD_hook",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_parameter",
        "torch.storage._load_from_bytes",
        "collections.OrderedDict",
        "copyreg._reconstructor",
        "copy_reg._reconstructor",
        "builtins.object",
        "__builtin__.object",
        "_codecs.encode",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.random._pickle.__randomstate_ctor",
        "numpy.random._pickle.__bit_generator_ctor",
        "numpy.random._mt19937.MT19937",
        *(f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        *(f"torch.{storage}" for storage in STORAGES),
    }
)
"""Every name that a saved state, or a checkpoint around it as torch's documentation makes it, mentions."""
