"""laconic trains PyTorch models over networks that are too slow for them.

Workers that hold copies of a model must agree; laconic lets them agree while they send 10 to 1000 times less:

    session = laconic.attach(laconic.power_sgd(), model, optimizer)

A plan answers four questions: when do workers synchronise (`schedule`), how are tensors encoded (`codec`), what is done
with the mean (`outer`), and with whom (`topology`). The training loop stays as it is.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from laconic.public import *  # noqa: F403
    from laconic.public import __all__ as __all__
else:

    def __getattr__(name: str) -> object:
        """Import the public names at the first use of one: they need torch, which takes a second or more."""
        from importlib import import_module

        if not name.startswith("__") or name == "__all__":
            names = vars(import_module("laconic.public"))
            if name in names:
                return globals().setdefault(name, names[name])
            if name in globals():  # a module of laconic, which has been imported meanwhile
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the public names, too."""
        return sorted({*globals(), *__getattr__("__all__")})
