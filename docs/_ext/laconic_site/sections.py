"""Sections of the doctrees, with their words in code and in prose."""

from __future__ import annotations

import re
from collections.abc import Iterator

from docutils import nodes

from laconic_site.keywords import Section

UNEXPLAINING = ("api/", "cli", "keywords", "changelog")
"""Pages that list every name: they are the reference, and explain none."""


def sections_of(page: str, doctree: nodes.document) -> Iterator[Section]:
    """Yield every section of a page with its own text, without that of its subsections."""
    if page.startswith(UNEXPLAINING):
        return
    for section in doctree.findall(nodes.section):
        texts, code = [], []
        for child in section.children:
            if isinstance(child, nodes.section):
                continue
            texts.append(child.astext())
            code += [each.astext() for each in child.findall(_is_code)]
        words = re.findall(r"--[a-z][\w-]*|[A-Za-z_]\w*", "\n".join(code))
        title = next((child.astext() for child in section.children if isinstance(child, nodes.title)), page)
        yield Section(page, section["ids"][0], title, frozenset(words), "\n".join(texts))


def _is_code(node: nodes.Node) -> bool:
    """Inline code and programs; blocks without a language are outputs and drawings."""
    if isinstance(node, nodes.literal_block):
        return node.get("language", "text") not in ("text", "none", "default")
    return isinstance(node, nodes.literal)
