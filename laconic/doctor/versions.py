"""Versions: whether they are supported, and whether all workers have the same."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires

import torch

from laconic.checks.outliers import names, outliers
from laconic.doctor.finding import Finding, ok, problem, warning

NAME = "versions"
PYTHON_AT_LEAST = (3, 11)


def versions_here() -> dict[str, str]:
    """The versions that decide whether workers understand each other."""
    from laconic import __version__

    return {"python": platform.python_version(), "torch": str(torch.__version__), "laconic": __version__}


def torch_range() -> tuple[str, str]:
    """The versions of torch that laconic is made for, from its own metadata: at least the first, below the second."""
    try:
        lines = requires("laconic") or []
    except PackageNotFoundError:  # run from a folder, not installed
        lines = []
    text = next((line for line in lines if re.match(r"torch\b", line)), "")
    low, high = re.search(r">=\s*([\d.]+)", text), re.search(r"<\s*([\d.]+)", text)
    return low[1] if low else "0", high[1] if high else "inf"


def check_versions(found: Mapping[str, str], low: str, high: str) -> Finding:
    """Whether these versions can run laconic.

    >>> check_versions({"python": "3.11.7", "torch": "2.13.0+cpu", "laconic": "0.1.0"}, "2.11", "3").verdict
    'ok'
    """
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    if numbers(found["python"]) < PYTHON_AT_LEAST:
        return problem(NAME, shown, "laconic needs Python 3.11 or newer.")
    if numbers(found["torch"]) < numbers(low):
        return problem(NAME, shown, f"laconic needs torch {low} or newer: pip install 'torch>={low}'.")
    if high != "inf" and numbers(found["torch"]) >= numbers(high):
        return warning(NAME, shown, f"laconic was not tried with torch {high} or newer: pip install 'torch<{high}'.")
    return ok(NAME, shown)


def compare_versions(said: Sequence[Mapping[str, str]]) -> list[Finding]:
    """What differs between workers. Python may, up to its last number; torch and laconic may not."""
    findings = []
    for what in ("laconic", "torch", "python"):
        each = [str(versions.get(what, "unknown")) for versions in said]
        usual, odd = outliers(each)
        if odd:
            shown = f"{what} {each[odd[0]]} on {names(odd)}, {usual} on the others"
            make = warning if what == "python" else problem
            findings.append(make("same versions", shown, f"Install the same {what} on all hosts."))
    return findings or [ok("same versions", f"the same on all {len(said)} workers")]


def numbers(version: str) -> tuple[int, ...]:
    """The numbers at the start of a version.

    >>> numbers("2.13.0+cpu"), numbers("2.14.0a0+git1"), numbers("3")
    ((2, 13, 0), (2, 14, 0), (3,))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
