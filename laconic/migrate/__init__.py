"""Find what to change in a training script to move it from torch's hooks and averagers to laconic's.

LibCST parses scripts; they are never run. `check` lists findings: the imports to change (`imports`) and known misuses
(`misuses`). `rewrite` changes the imports and keeps every other byte; `write` replaces the file in one step.

    for finding in check(read_script("train.py")):
        print(finding.line, finding.why, finding.way_out)
"""

from collections.abc import Iterable
from dataclasses import replace

try:
    import libcst
except ImportError as error:
    raise ImportError(
        "laconic.migrate needs LibCST, which is not installed. It reads and rewrites scripts with it. "
        'Install it with pip install "laconic[migrate]".'
    ) from error

from laconic.migrate.imports import Replace, changes
from laconic.migrate.misuses import misuses
from laconic.migrate.script import Finding, Script, ScriptError, parse, read_script, write

__all__ = ["Finding", "Script", "ScriptError", "check", "read_script", "remaining", "rewrite", "write"]


def check(script: Script) -> list[Finding]:
    """Return what there is to change in a script, from top to bottom."""
    parsed = parse(script)
    findings, _ = changes(parsed)
    uses_twin = any(path.startswith("laconic.algorithms") for path in parsed.imported)
    return sorted({*findings, *misuses(parsed, is_migrated=uses_twin and not remaining(findings))})


def rewrite(script: Script) -> Script:
    """Return the script with its imports changed and all else as it was."""
    parsed = parse(script)
    _, new = changes(parsed)
    if not new:
        return script
    if parsed.module.code != script.text:
        raise ScriptError(
            f"{script.path}: LibCST {libcst.LIBCST_VERSION} does not keep every byte of this file (form feeds before "
            "code, or carriage returns as line ends), so nothing was changed. Change the listed imports by hand."
        )
    return replace(script, text=parsed.module.visit(Replace(new)).code)


def remaining(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that need a change."""
    return [finding for finding in findings if finding.kind != "stays"]
