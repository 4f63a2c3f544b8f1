"""Versions of Python, torch and laconic: supported, and the same on all workers."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires

import torch

from laconic.checks.outliers import names, outliers
from laconic.doctor.finding import Finding, ok, problem, warning


def versions_here() -> dict[str, str]:
    """Return the versions that must fit together."""
    from laconic import __version__

    return {"python": platform.python_version(), "torch": str(torch.__version__), "laconic": __version__}


def torch_range() -> tuple[str, str]:
    """Return the supported range of torch from laconic's metadata: at least the first, below the second."""
    try:
        lines = requires("laconic") or []
    except PackageNotFoundError:  # run from a folder, not installed
        lines = []
    text = next((line for line in lines if re.match(r"torch\b", line)), "")
    low, high = re.search(r">=\s*([\d.]+)", text), re.search(r"<\s*([\d.]+)", text)
    return low[1] if low else "0", high[1] if high else "999"


def check_versions(versions: Mapping[str, str], low: str, high: str) -> Finding:
    """Check that laconic supports this version of torch.

    >>> check_versions({"python": "3.11.7", "torch": "2.13.0+cpu", "laconic": "0.1.0"}, "2.11", "3").verdict
    'ok'
    """
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    if numbers(versions["torch"]) < numbers(low):
        return problem("versions", shown, f"laconic needs torch {low} or newer.", f"pip install 'torch>={low}'.")
    if numbers(versions["torch"]) >= numbers(high):
        why = f"laconic is not tested with torch {high} or newer."
        return warning("versions", shown, why, f"pip install 'torch<{high}'.")
    return ok("versions", shown)


def compare_versions(by_worker: Sequence[Mapping[str, str]]) -> list[Finding]:
    """Check that all workers have the same versions; a different Python is only a warning."""
    findings = []
    for package in ("laconic", "torch", "python"):
        versions = [str(each.get(package, "unknown")) for each in by_worker]
        usual, odd = outliers(versions)
        if odd:
            shown = f"{package} {versions[odd[0]]} on {names(odd)}, {usual} on the others"
            make, why = problem, "laconic.attach refuses workers with different versions."
            if package == "python":
                make, why = warning, "Workers may shuffle data or load files differently."
            findings.append(make("same versions", shown, why, f"Install the same {package} on all hosts."))
    return findings or [ok("same versions", f"the same on all {len(by_worker)} workers")]


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the start of a version.

    >>> numbers("2.13.0+cpu"), numbers("2.14.0a0+git1"), numbers("3")
    ((2, 13, 0), (2, 14, 0), (3,))
    """
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
