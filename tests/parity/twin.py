"""Register the twin under torch's names, so that a file that imports torch's modules gets the twin.

This must happen before that file is imported. `sys.modules` gets the twin's modules under torch's names. In torch's
packages, every attribute that is a replaced module, also under an alias such as `ddp_comm_hooks.powerSGD`, and every
name of `REPLACED_NAMES` is replaced.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

ALGORITHMS = "torch.distributed.algorithms"

REPLACED_MODULES = {
    **{
        f"{ALGORITHMS}.{below}": below
        for below in (
            "ddp_comm_hooks.powerSGD_hook",
            "ddp_comm_hooks.post_localSGD_hook",
            "ddp_comm_hooks.default_hooks",
            "ddp_comm_hooks.quantization_hooks",
            "ddp_comm_hooks.debugging_hooks",
            "model_averaging.averagers",
            "model_averaging.hierarchical_model_averager",
            "model_averaging.utils",
        )
    },
    "torch.distributed.optim.post_localSGD_optimizer": "optim",
}
"""The twin's module, relative to its package, for each of torch's. torch has the optimizer in another package."""

REPLACED_NAMES = {
    f"{ALGORITHMS}.ddp_comm_hooks": ("ddp_comm_hooks", ("DDPCommHookType", "register_ddp_comm_hook")),
    "torch.distributed.optim": ("optim", ("PostLocalSGDOptimizer",)),
}
"""For each of torch's packages, the twin's module with the names that the package itself has."""


def replace_modules(package: str) -> dict[ModuleType, ModuleType]:
    """Replace torch's modules by those of `package`. Return the twin of each replaced module."""
    # Import everything first: if the twin uses torch's modules itself, it must get torch's.
    twins = {
        importlib.import_module(name): importlib.import_module(f"{package}.{below}")
        for name, below in REPLACED_MODULES.items()
    }
    for name in REPLACED_NAMES:
        importlib.import_module(name)
    by_name = {original.__name__: twin for original, twin in twins.items()}
    for holder in list(sys.modules.values()):
        if getattr(holder, "__name__", "").startswith("torch.distributed") and holder not in twins:
            _replace_attributes(holder, twins)
    sys.modules.update(by_name)
    for name, (below, replaced) in REPLACED_NAMES.items():
        source = importlib.import_module(f"{package}.{below}")
        for attribute in replaced:
            setattr(sys.modules[name], attribute, getattr(source, attribute))
    return twins


def _replace_attributes(holder: ModuleType, twins: dict[ModuleType, ModuleType]) -> None:
    for attribute, value in list(vars(holder).items()):
        # type(value), because any attribute access on torch.distributed.reduce_op warns
        if issubclass(type(value), ModuleType) and value in twins:
            setattr(holder, attribute, twins[value])
