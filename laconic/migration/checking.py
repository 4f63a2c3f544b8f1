"""All findings of a script in order, and the script with its imports changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from laconic.migration.findings import Finding
from laconic.migration.imports import Change, changes
from laconic.migration.misuses import misuses
from laconic.migration.script import Script, ScriptError

_BY_HAND = " It is written in a way that is left to a person."


def check(script: Script) -> list[Finding]:
    """What there is to say about a script, from top to bottom."""
    return sorted({*(_honest(change).finding for change in changes(script)), *misuses(script)})


def rewrite(script: Script) -> Script:
    """The script with its imports changed and all else as it was; the same script if nothing changes."""
    edits = {edit for change in changes(script) for edit in change.edits}
    try:
        return script.edited(edits) if edits else script
    except ScriptError as error:
        raise ScriptError(
            f"{script.path}: with its imports changed it would no longer parse, so it was left as it is. "
            "Change the listed imports by hand."
        ) from error


def remaining(findings: Iterable[Finding]) -> list[Finding]:
    """The findings that ask for something to be done."""
    return [finding for finding in findings if finding.kind != "stays"]


def _honest(change: Change) -> Change:
    """An import for which there is no edit is not promised to be changed."""
    if change.finding.kind == "import" and not change.edits:
        finding = replace(change.finding, kind="by hand", way_out=change.finding.way_out + _BY_HAND)
        return Change(finding)
    return change
