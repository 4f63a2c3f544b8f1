"""Directives: the command reference, the public modules of a package, and the keyword map."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from docutils import nodes
from sphinx.directives.other import TocTree
from sphinx.util.docutils import SphinxDirective

from laconic_site import commands


class keyword_map(nodes.General, nodes.Element):  # type: ignore[misc]
    """Stands for the map until all pages are read."""


class Commands(SphinxDirective):  # type: ignore[misc]
    """The reference of all commands."""

    def run(self) -> list[nodes.Node]:
        """Parse the Markdown that the commands make."""
        found: list[nodes.Node] = self.parse_text_to_nodes(commands.reference(), allow_section_headings=True)
        return found


class Existing(TocTree):  # type: ignore[misc]
    """A toctree that leaves out pages which do not exist, such as those of a framework that is not supported yet."""

    content: list[str]

    def parse_content(self, toctree: nodes.Node) -> None:
        """Parse the entries that exist."""
        exists = self.env.found_docs
        self.content = [entry for entry in self.content if entry.split("<")[-1].rstrip(">") in exists]
        super().parse_content(toctree)


class KeywordMap(SphinxDirective):  # type: ignore[misc]
    """The keyword map, or with the argument "files" the list of source pages."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Leave a place for it."""
        return [keyword_map(what=self.arguments[0] if self.arguments else "keywords")]


class Modules(SphinxDirective):  # type: ignore[misc]
    """Every module of a package, with all its public names: `{modules} laconic.integrations`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Document each module that the package holds."""
        package = import_module(self.arguments[0])
        names = sorted(f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__))
        text = "\n\n".join(f"## {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```" for name in names)
        self.state.document.settings.env.note_dependency(str(package.__file__))
        found: list[nodes.Node] = self.parse_text_to_nodes(text, allow_section_headings=True)
        return found
