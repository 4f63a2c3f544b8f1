"""Puts the twin under torch's names, so that a file which imports torch's modules gets the twin.

It must run before that file is imported. `sys.modules` gets the twin's modules under torch's names, and
every attribute of a torch package that holds a replaced module, or a name of `REPLACED_NAMES`, is set anew. The
aliases (`ddp_comm_hooks.powerSGD`, `.default`, `.quantization`, ...) are covered by that.
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
"""torch's module and the twin's, below its package. torch keeps the optimizer in another package."""

REPLACED_NAMES = {
    f"{ALGORITHMS}.ddp_comm_hooks": ("ddp_comm_hooks", ("DDPCommHookType", "register_ddp_comm_hook")),
    "torch.distributed.optim": ("optim", ("PostLocalSGDOptimizer",)),
}
"""Names that torch's packages hold themselves, and the twin's module which has them."""


def put_in_place(package: str) -> dict[ModuleType, ModuleType]:
    """Replace torch's modules by those of `package`; returns the twin of each replaced module."""
    # All imports first: the twin may use torch's modules itself, and must then get torch's.
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
        # by type(): torch.distributed.reduce_op warns when it is asked for anything
        if issubclass(type(value), ModuleType) and value in twins:
            setattr(holder, attribute, twins[value])
