"""Links to files of the repository lead to pages of the site, and pictures follow the colours of the page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

INCLUDED = {"README.md": "index", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}
"""Pages of the repository's root, and where the site has them."""
SOURCES = ("laconic", "tests", "examples", "benchmarks")


class FileLinks(SphinxTransform):  # type: ignore[misc]
    """Turns links to source files, which Sphinx would offer for download, into links to their pages."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Replace the links of one document."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        up = "../" * self.env.docname.count("/")
        for node in list(self.document.findall(addnodes.download_reference)):
            target, _, line = node["reftarget"].partition("#")
            try:
                path = (here / target).resolve().relative_to(Path(self.env.srcdir).parent).as_posix()
            except ValueError:
                continue
            if path in INCLUDED:
                uri = f"{up}{INCLUDED[path]}.html"
            elif path.split("/")[0] in SOURCES and path.endswith(".py"):
                uri = f"{up}source/{path}.html" + (f"#{line}" if line else "")
            else:
                continue
            node.replace_self(nodes.reference("", "", *node.children, internal=True, refuri=uri))


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
                html = f'<div class="picture">{svg}</div>'
                node.replace_self(nodes.raw("", html, format="html"))
