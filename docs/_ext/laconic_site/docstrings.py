"""Docstrings as Sphinx reads them: code between single backticks, and indented examples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from docutils import nodes
from docutils.parsers.rst.states import Inliner
from sphinx import addnodes


def process(app: Any, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Make indented blocks after a colon and an empty line literal: docstrings write code like that."""
    for index in range(1, len(lines) - 1):
        text, empty, block = lines[index - 1 : index + 2]
        opens = text.endswith(":") and not text.endswith("::") and not empty.strip()
        if opens and len(block) - len(block.lstrip()) >= len(text) - len(text.lstrip()) + 4:
            lines[index - 1] = text + ":"


def code_role(
    name: str, raw: str, text: str, line: int, inliner: Inliner, options: Any = None, content: Sequence[str] = ()
) -> tuple[list[nodes.Node], list[nodes.system_message]]:
    """Show `text` as code, and link it where it names something that the site documents.

    `attach(guard=...)` leads to `attach`. What is not documented stays plain code.
    """
    shown = nodes.literal(raw, nodes.unescape(text), classes=["xref", "py"])
    match = re.fullmatch(r"([A-Za-z_][\w.]*)(\(.*\))?", text, re.S)
    if match is None or text.isalpha() and text.islower():  # `plan` may be a parameter, `plan(...)` is the function
        return [shown], []
    env = inliner.document.settings.env
    node = addnodes.pending_xref(raw, shown, refdomain="py", reftype="obj", reftarget=match.group(1), refdoc=env.docname)
    node["refexplicit"] = node["refwarn"] = False
    node["py:module"] = env.ref_context.get("py:module") or "laconic"
    node["py:class"] = env.ref_context.get("py:class")
    return [node], []
