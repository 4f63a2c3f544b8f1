"""The keyword index: every keyword, where it is defined, which sections explain it, and which tests exercise it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from laconic_site.glossary import Term, pattern_of
from laconic_site.names import Definition, Source
from laconic_site.usages import Usage, exercising

PUBLIC = ("laconic.public", "laconic.comm", "laconic.checkpoint", "laconic.elastic")
"""The modules whose `__all__` is public; those of the twin and of the integrations are, too."""
_WEAK = ("log", "changelog")
"""Pages that tell what happened, and come last among those that explain."""


@dataclass(frozen=True)
class Section:
    """A section of the site: its words in code and in prose, without those of its subsections."""

    page: str
    anchor: str
    title: str
    code: frozenset[str]
    text: str


@dataclass(frozen=True)
class Option:
    """An option of the command, and where its function declares it."""

    name: str
    command: str
    path: str
    line: int
    doc: str


@dataclass
class Keyword:
    """One entry of the index. Places are paths with a line, sections are pages with an anchor."""

    name: str
    kind: str
    public: bool = False
    definitions: list[Definition] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    tests: list[Usage] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """What keywords.json says of it; addresses are relative to the site."""
        return {
            "kind": self.kind,
            "public": self.public,
            "definitions": [
                {"name": d.qualname, "at": f"{d.path}:{d.line}", "href": href_of(d.path, d.line)}
                for d in self.definitions
            ],
            "sections": [{"title": s.title, "page": s.page, "href": section_href(s)} for s in self.sections],
            "tests": [
                {"name": t.name, "at": f"{t.path}:{t.line}", "href": href_of(t.path, t.line)} for t in self.tests
            ],
        }


@dataclass
class Index:
    """All keywords, and those of each source file."""

    keywords: dict[str, Keyword]
    by_file: dict[str, list[str]]

    def unexplained(self) -> list[str]:
        """Return the public names that no section explains."""
        return sorted(k.name for k in self.keywords.values() if k.public and not k.sections)

    def as_json(self) -> dict[str, object]:
        """The content of keywords.json."""
        return {
            "keywords": {name: keyword.as_json() for name, keyword in sorted(self.keywords.items())},
            "files": dict(sorted(self.by_file.items())),
        }


def href_of(path: str, line: int) -> str:
    """Return the address of a source line in the site.

    >>> href_of("laconic/ledger.py", 7)
    'source/laconic/ledger.py.html#L7'
    """
    return f"source/{path}.html#L{line}"


def section_href(section: Section) -> str:
    """Return the address of a section in the site."""
    return f"{section.page}.html#{section.anchor}"


def public_names(sources: Iterable[Source]) -> set[str]:
    """Return every public name: of the public modules, the twin and the integrations."""
    found: set[str] = set()
    for source in sources:
        if source.module in PUBLIC or source.module.startswith(("laconic.algorithms", "laconic.integrations")):
            found |= set(source.exports)
    return found


def build(
    sources: Iterable[Source],
    usages: Mapping[str, list[Usage]],
    sections: Iterable[Section],
    terms: Iterable[Term],
    options: Iterable[Option],
) -> Index:
    """Join definitions, sections and tests."""
    sources, words = list(sources), _Words(sections)
    keywords: dict[str, Keyword] = {}
    by_file: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        for definition in source.definitions:
            found = keywords.setdefault(definition.name, Keyword(definition.name, definition.kind))
            found.definitions.append(definition)
            by_file[source.path].append(definition.name)
    for option in options:
        found = keywords.setdefault(option.name, Keyword(option.name, "option"))
        found.definitions.append(
            Definition(option.name, "option", f"{option.command} {option.name}", option.path, option.line, option.doc)
        )
        by_file[option.path].append(option.name)
    public = public_names(sources)
    for found in keywords.values():
        found.public = found.name in public
        found.sections = words.sections_of(found.name)
        found.tests = _tests(found, usages)
    for term in terms:
        keywords[term.name] = _term(term, keywords, words, usages)
        for source in sources:
            if pattern_of(term.name).search(source.text.lower()):
                by_file[source.path].append(term.name)
    for source in sources:  # errors that a file raises and another one defines
        by_file[source.path] += [name for name in source.raises if name in keywords]
    return Index(keywords, {path: list(dict.fromkeys(names)) for path, names in by_file.items()})


def _tests(keyword: Keyword, usages: Mapping[str, list[Usage]]) -> list[Usage]:
    paths = {d.path for d in keyword.definitions}
    found = exercising(keyword.name, paths, dict(usages))
    owners = [re.split(r"[.(]", d.qualname)[0] for d in keyword.definitions if d.kind == "parameter"]
    if not found and owners:  # passed by position: the tests of what takes it
        found = exercising(owners[0], paths, dict(usages))
    return found


def _term(term: Term, keywords: Mapping[str, Keyword], words: _Words, usages: Mapping[str, list[Usage]]) -> Keyword:
    """Make the keyword of a term: the code that its explanation names is where it is defined and tested."""
    code = [keywords[name] for name in term.code if name in keywords]
    definitions = [each.definitions[0] for each in code]
    tests = list(dict.fromkeys(test for each in code for test in each.tests[:3]))[:5]
    return Keyword(term.name, "term", False, definitions, words.sections_of_term(term), tests)


class _Words:
    """Sections by the words in them."""

    def __init__(self, sections: Iterable[Section]) -> None:
        self.sections = list(sections)
        self._by_code: dict[str, list[int]] = defaultdict(list)
        self._by_word: dict[str, list[int]] = defaultdict(list)
        for index, section in enumerate(self.sections):
            for name in section.code:
                self._by_code[name].append(index)
            for name in set(re.findall(r"\w+", section.text)):
                self._by_word[name].append(index)

    def sections_of(self, name: str, most: int = 8) -> list[Section]:
        """Return the sections that mention a name: in code, or, if it is no word of English, anywhere."""
        distinct = "_" in name or re.search(r"[a-z][A-Z]|[A-Z]{2}", name)
        found = set(self._by_code.get(name, [])) | set(self._by_word.get(name, []) if distinct else [])
        return self._ranked(found, re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.IGNORECASE), most)

    def sections_of_term(self, term: Term, most: int = 8) -> list[Section]:
        """Return the sections that mention a term, its entry in the glossary first."""
        pattern = pattern_of(term.name)
        found = {i for i, section in enumerate(self.sections) if pattern.search(section.text.lower())}
        return self._ranked(found, pattern, most)

    def _ranked(self, found: set[int], pattern: re.Pattern[str], most: int) -> list[Section]:
        def rank(index: int) -> tuple[int, ...]:
            section = self.sections[index]
            title, mentions = section.title.lower(), len(pattern.findall(section.text.lower()))
            exact = pattern.fullmatch(title) is not None
            return (-exact, section.page in _WEAK, -(pattern.search(title) is not None), -mentions, index)

        return [self.sections[index] for index in sorted(found, key=rank)[:most]]
