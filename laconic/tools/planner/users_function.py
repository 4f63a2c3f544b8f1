"""A function of the user's, given as "module:function"."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def users_function(place: str) -> Iterator[Callable[..., Any]]:
    """Import "module:function". Modules of the current folder are found too, also by the function in the block."""
    module, _, name = place.partition(":")
    sys.path.insert(0, "")
    try:
        yield getattr(importlib.import_module(module), name)
    finally:
        sys.path.remove("")
