"""Importing laconic is quiet and brings nothing that only a command needs."""

from __future__ import annotations

import subprocess
import sys

import laconic

SCRIPT = """
import sys
import laconic
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
