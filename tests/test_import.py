"""Importing laconic is quiet and brings nothing that only a command needs."""

from __future__ import annotations

import subprocess
import sys

import laconic

SCRIPT = """
import sys
import laconic
laconic.attach
print(sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[1:])), file=sys.__stderr__)
"""


def test_importing_prints_nothing_and_brings_no_extras() -> None:
    extras = ["rich", "typer", "click", "matplotlib", "sklearn", "triton", "torchft", "pytest", "hypothesis"]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, *extras], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout == ""
    assert done.stderr.strip() == "[]"


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(laconic.__all__) == laconic.__all__
    for name in laconic.__all__:
        assert getattr(laconic, name).__doc__


LAZY = """
import sys
import laconic
from laconic.tools.units import parse
assert not {"torch", "laconic.public"} & set(sys.modules), "a name was imported before its use"
assert laconic.__version__ and {"attach", "__version__"} <= set(dir(laconic))
from laconic import checkpoint, optim
from laconic import *
assert attach is laconic.attach is sys.modules["laconic.session.attach"].attach
assert laconic.plan("auto") == auto()
assert laconic.codecs.contract.Codec is Codec
assert set(laconic.__all__) <= set(globals())
assert not hasattr(laconic, "atach") and not hasattr(laconic, "__wrapped__")
"""


def test_names_are_imported_at_their_first_use() -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", LAZY], check=True, timeout=120)
