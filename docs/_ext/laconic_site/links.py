"""Links to files of the repository lead to pages of the site, and pictures follow the colours of the page."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

INCLUDED = {"README": "index", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog"}
"""Pages of the repository's root, and where the site has them."""
PAGE = re.compile(r"[\w/]+\.md")
SOURCES = ("laconic", "tests", "examples", "benchmarks")


class FileLinks(SphinxTransform):  # type: ignore[misc]
    """Leads links to files outside of docs/ to the site's own pages; Sphinx would offer the files for download."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace the links of one document."""
        root = Path(self.env.srcdir).parent
        here = Path(self.env.doc2path(self.env.docname)).parent
        up = "../" * self.env.docname.count("/")
        for node in list(self.document.findall(addnodes.download_reference)):
            path = os.path.relpath((here / node["reftarget"]).resolve(), root)
            if path.split("/")[0] in SOURCES and path.endswith(".py"):
                uri = f"{up}source/{path}.html"
                node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))
        for node in self.document.findall(addnodes.pending_xref):
            if PAGE.fullmatch(node.astext()):  # where a forge shows a file, the site has a title
                node.clear()
                node["refexplicit"] = False
            if node.get("refdomain") == "doc" and node["reftarget"] in (str(root / name) for name in INCLUDED):
                node["reftarget"] = INCLUDED[Path(node["reftarget"]).name]


class InlinePictures(SphinxPostTransform):  # type: ignore[misc]
    """Puts SVG pictures into the page itself, where its style sheet colours them, in light and in dark."""

    default_priority = 5
    formats = ("html",)

    def run(self, **_: Any) -> None:
        """Replace the pictures of one document."""
        for node in list(self.document.findall(nodes.image)):
            if node["uri"].endswith(".svg"):
                text = (Path(self.env.srcdir) / node["uri"]).read_text()
                svg = re.sub(r"<style>.*?</style>|<\?xml.*?\?>", "", text, flags=re.S)
                width = re.search(r'viewBox="0 0 (\d+)', svg)
                html = f'<div class="picture" style="--width: {width[1] if width else 760}">{svg}</div>'
                node.replace_self(nodes.raw("", html, format="html"))
