"""torch.compile: the model inside a compiled one, and the names of its parameters."""

from __future__ import annotations

from torch import nn

_PLACE = "_orig_mod"


def inside_compiled(model: nn.Module) -> nn.Module | None:
    """Return the model inside a compiled one; None for another model."""
    return getattr(model, _PLACE) if type(model).__name__ == "OptimizedModule" else None


def clean(name: str) -> str:
    """Remove what torch.compile puts into a parameter's name.

    >>> clean("_orig_mod.layers.0._orig_mod.weight")
    'layers.0.weight'
    """
    return name.replace(f"{_PLACE}.", "")
