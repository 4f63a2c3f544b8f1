"""The versions that results depend on."""

import platform
from importlib.metadata import version

import torch


def versions() -> dict[str, str]:
    """The versions that results depend on."""
    return {"laconic": version("laconic"), "torch": torch.__version__, "python": platform.python_version()}
