"""The terms of docs/glossary.md: one heading for each, and the code that its text names."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A term, the names of code in its explanation, and the line of its heading."""

    name: str
    code: tuple[str, ...]
    line: int
    anchor: str


def read_terms(text: str) -> list[Term]:
    """Read the headings of the second level.

    >>> read_terms("# Glossary\\n\\n## error feedback\\n\\nWhat `ErrorFeedback` does.\\n")
    [Term(name='error feedback', code=('ErrorFeedback',), line=3, anchor='error-feedback')]
    """
    terms = []
    for part in re.finditer(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.M | re.S):
        name, body = part.group(1).strip().replace("`", ""), part.group(2)
        code = dict.fromkeys(re.findall(r"`([A-Za-z_]\w*)", body))
        line = text.count("\n", 0, part.start()) + 1
        terms.append(Term(name, tuple(code), line, re.sub(r"[^\w]+", "-", name.lower()).strip("-")))
    return terms


def pattern_of(term: str) -> re.Pattern[str]:
    """Match a term as whole words, also in the plural and with a hyphen between its words.

    >>> bool(pattern_of("error feedback").search("with error-feedback on"))
    True
    >>> bool(pattern_of("bucket").search("DDP's buckets")), bool(pattern_of("bucket").search("bucketed"))
    (True, False)
    """
    words = r"[\s-]+".join(re.escape(word) for word in term.lower().split())
    return re.compile(rf"(?<!\w){words}(?:s|es)?(?!\w)")
