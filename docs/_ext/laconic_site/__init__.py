"""The site's own extension: source pages, the keyword index, the command reference and links to files.

`names.py`, `usages.py`, `glossary.py` and `keywords.py` read the repository and need nothing but Python; `sections.py`,
`links.py` and `docstrings.py` work on Sphinx's documents; `pages.py` writes HTML.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laconic_site.keywords import Index
    from laconic_site.names import Source

__all__ = ["setup"]


def setup(app: Any) -> dict[str, Any]:
    """Register everything with Sphinx."""
    from docutils.parsers.rst import roles

    from laconic_site import directives, docstrings, links

    roles.register_local_role("code-link", docstrings.code_role)
    app.add_directive("commands", directives.Commands)
    app.add_directive("keyword-map", directives.KeywordMap)
    app.add_directive("modules", directives.Modules)
    app.add_directive("existing", directives.Existing)
    app.add_transform(links.FileLinks)
    app.add_post_transform(links.InlinePictures)
    app.connect("autodoc-process-docstring", docstrings.process)
    app.connect("env-check-consistency", _index)
    app.connect("doctree-resolved", _fill_map)
    app.connect("html-collect-pages", _source_pages)
    app.connect("build-finished", _write_json)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _index(app: Any, env: Any) -> None:
    """Build the index when all documents are read. A public name that no section explains is a warning."""
    from sphinx.util import logging

    from laconic_site import commands, glossary, keywords, names, sections, usages

    root = Path(app.srcdir).parent
    app.laconic_sources = names.read_sources(root)
    app.laconic_others = names.read_sources(root, ("examples", "benchmarks", "tests"))
    found = [s for page in sorted(env.found_docs) for s in sections.sections_of(page, env.get_doctree(page))]
    terms = glossary.read_terms((root / "docs" / "glossary.md").read_text())
    app.laconic_index = keywords.build(
        app.laconic_sources, usages.read_tests(root), found, terms, commands.options(root)
    )
    for name in app.laconic_index.unexplained():
        logging.getLogger(__name__).warning("no section explains the public name %s: write one.", name)


def _fill_map(app: Any, doctree: Any, page: str) -> None:
    from docutils import nodes

    from laconic_site import pages
    from laconic_site.directives import keyword_map

    for node in list(doctree.findall(keyword_map)):
        html = (
            pages.keyword_map(app.laconic_index) if node["what"] == "keywords" else pages.file_list(app.laconic_sources)
        )
        node.replace_self(nodes.raw("", html, format="html"))


def _source_pages(app: Any) -> Iterator[tuple[str, dict[str, Any], str]]:
    from laconic_site import pages

    index: Index = app.laconic_index
    sources: list[Source] = [*app.laconic_sources, *app.laconic_others]
    highlight = partial(_highlighted, app.builder.highlighter)
    navigation: dict[int, str] = {}

    def toctree(page: str, **options: Any) -> str:
        """Return the navigation of the site, made once for each depth: its links are relative."""
        depth = page.count("/")
        if depth not in navigation:
            navigation[depth] = app.builder._get_local_toctree(page, **options)
        return navigation[depth]

    for source in sources:
        page = f"source/{source.path}"
        body = pages.source_page(source, index, highlight)
        context = {"title": source.path, "body": body, "display_toc": False, "toctree": partial(toctree, page)}
        yield page, context, "page.html"


def _highlighted(highlighter: Any, text: str) -> str:
    html: str = highlighter.highlight_block(text, "python", lineanchors="L", linenos="inline")
    return re.sub(r'<a id="L-(\d+)" name="L-\d+"></a>', r'<a id="L\1"></a>', html)


def _write_json(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "keywords.json").write_text(json.dumps(app.laconic_index.as_json(), indent=1) + "\n")
