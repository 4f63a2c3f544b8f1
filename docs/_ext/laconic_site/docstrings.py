"""Docstrings as Sphinx reads them: code between single backticks, and indented examples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes

_FIELDS = {"Args:": "param", "Raises:": "raises"}


def process(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Turn a docstring of this project into reStructuredText: examples, parameters, and stars that mean a star."""
    lines[:] = _literal_blocks(_fields(lines))


def _literal_blocks(lines: Sequence[str]) -> list[str]:
    """Mark indented blocks after an empty line as literal.

    >>> _literal_blocks(["Use it:", "", "    x = [*y]", "", "Of [n, *shape], *not* always."])
    ['Use it:', '', '::', '', '    x = [*y]', '', 'Of [n, \\\\*shape], *not* always.']
    """
    found: list[str] = []
    inside = False
    for line in lines:
        indented = line.startswith("    ")
        if indented and not inside and found and not found[-1].strip() and not _in_field(found):
            inside = True
            found += ["::", ""]
        inside = inside and (indented or not line)
        found.append(line if inside else re.sub(r"(?<![*\w])\*(?=\w)(?![^*]*\w\*)", r"\\*", line))
    return found


def _in_field(lines: Sequence[str]) -> bool:
    last = next((line for line in reversed(lines) if line.strip()), "")
    return last.startswith((":", "- ", "  "))


def _fields(lines: Sequence[str]) -> list[str]:
    """Turn the lines below `Args:` and `Raises:` into fields.

    >>> _fields(["Args:", "    rank: Of the factors,", "        at least 1.", "", "More."])
    ['', ':param rank: Of the factors,', '        at least 1.', '', 'More.']
    """
    found, inside = [], ""
    for line in lines:
        if line in _FIELDS:
            inside = _FIELDS[line]
            found.append("")
            continue
        inside = inside if not line or line.startswith(" ") else ""
        found.append(re.sub(r"^ {4}(\w+):", rf":{inside} \1:", line) if inside else line)
    return found


def code_role(
    name: str, raw: str, text: str, line: int, inliner: Inliner, options: Any = None, content: Sequence[str] = ()
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Show `text` as code, and link it where it names something that the site documents.

    `attach(commit=...)` leads to `attach`. What is not documented stays plain code.
    """
    shown = nodes.literal(raw, nodes.unescape(text), classes=["xref", "py"])
    match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", text, re.S)
    if match is None or (text.isalpha() and text.islower()):  # `plan` may be a parameter, `plan(...)` is the function
        return [shown], []
    env = inliner.document.settings.env
    target = re.sub(r"^session\.", "laconic.Session.", match.group(1))
    node = addnodes.pending_xref(raw, shown, refdomain="py", reftype="obj", reftarget=target, refdoc=env.docname)
    node["refexplicit"] = node["refwarn"] = False
    node["py:module"] = env.ref_context.get("py:module") or "laconic"
    node["py:class"] = env.ref_context.get("py:class")
    return [node], []
