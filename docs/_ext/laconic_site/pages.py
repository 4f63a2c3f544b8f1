"""The HTML of source pages and of the keyword map. Addresses are relative to the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from html import escape

from laconic_site.keywords import Index, Keyword, href_of, section_href
from laconic_site.names import Source

Highlight = Callable[[str], str]
"""Returns a Python source as HTML in which each line has the anchor `L` and its number."""


def source_page(source: Source, index: Index, highlight: Highlight) -> str:
    """Return the page of a source file: its keywords, and its text with an anchor for each line."""
    up = "../" * (source.path.count("/") + 1)
    names = index.by_file.get(source.path, [])
    table = keyword_table([index.keywords[name] for name in names], up, source.path) if names else ""
    summary = _prose(source.doc.partition("\n\n")[0])
    return (
        f'<section id="file"><h1>{escape(source.path)}</h1><p>{summary}</p>'
        + (f'<section id="keywords"><h2>Keywords</h2>{table}</section>' if table else "")
        + f'<section id="source"><h2>Source</h2>{highlight(source.text)}</section></section>'
    )


def keyword_table(keywords: Iterable[Keyword], up: str, path: str = "") -> str:
    """Return a table of keywords; definitions in `path`, if given, come first."""
    rows = "".join(_row(keyword, up, path) for keyword in keywords)
    head = "".join(f"<th>{title}</th>" for title in ("keyword", "defined", "explained", "tested"))
    table = f'<table class="docutils keywords"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'<div class="table-wrapper">{table}</div>'


def keyword_map(index: Index) -> str:
    """Return the map of the whole site: for each public keyword, option, error and term, where it is explained."""
    shown = [k for k in index.keywords.values() if k.sections and (k.public or k.kind in ("option", "term", "error"))]
    shown += [
        k for k in index.keywords.values() if k.sections and k.kind == "parameter" and "_" in k.name and k not in shown
    ]
    shown.sort(key=lambda keyword: keyword.name.lstrip("-").lower())
    data = '<p>As data, with all definitions: <a href="keywords.json">keywords.json</a>.</p>'
    return data + keyword_table(shown, "")


def file_list(sources: Iterable[Source]) -> str:
    """Return the list of all source pages, with the first sentence of each file."""
    items = "".join(
        f'<li><a href="source/{s.path}.html"><code>{s.path}</code></a> {_prose(s.doc.partition(chr(10))[0])}</li>'
        for s in sources
    )
    return f'<ul class="files">{items}</ul>'


def _row(keyword: Keyword, up: str, path: str) -> str:
    here = [definition for definition in keyword.definitions if definition.path == path]
    places = (here or keyword.definitions)[:4]
    defined = [_link(up + href_of(d.path, d.line), d.qualname, f"{d.path}:{d.line}") for d in places]
    if not path and keyword.kind == "term":
        defined = []
    explained = [
        f"{_link(up + section_href(s), s.title, s.page)} <small>{s.page}</small>" for s in keyword.sections[:5]
    ]
    tested = [_link(up + href_of(t.path, t.line), t.name, f"{t.path}:{t.line}") for t in keyword.tests[:3]]
    name = escape(keyword.name)
    label = name if keyword.kind == "term" else f"<code>{name}</code>"
    cells = [f'<span id="{_anchor(keyword.name)}">{label}</span> <small>{keyword.kind}</small>']
    cells += ["<br>".join(each) for each in (defined, explained, tested)]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _anchor(name: str) -> str:
    return "k-" + name.strip("-").replace(" ", "-")


def _link(href: str, text: str, title: str) -> str:
    return f'<a href="{escape(href)}" title="{escape(title)}">{escape(text)}</a>'
