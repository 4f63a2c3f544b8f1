"""Every code block of the site is run by a test, or says why not: `<!-- not run: the reason -->` on the line above it.

`python` blocks are run by test_readme.py, `python WORD` blocks by a test that names the page and the word. Commands of
laconic in `sh`, `bash` and unmarked blocks are parsed here with their options. A `diff` shows a change and is not run.
"""

from __future__ import annotations

import ast
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from laconic_site.commands import commands

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"^(<!-- not run[^\n]*?: (?P<reason>[^\n]+) -->\n)?"
    r"```(?P<info>[^\n`]*)\n(?P<body>.*?)^```$",
    re.M | re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word after it, its text, and why it is not run."""

    language: str
    word: str
    text: str
    reason: str


def blocks(page: Path) -> list[Block]:
    found = []
    for match in _BLOCK.finditer(page.read_text()):
        language, _, word = match["info"].strip().partition(" ")
        found.append(Block(language, word, match["body"], match["reason"] or ""))
    return [block for block in found if not block.language.startswith("{")]


def runners(page: str, word: str) -> list[Path]:
    """Return the tests that name a page, and `python WORD` or "WORD"."""
    named = re.compile(rf'python {word}\b|"{word}"')
    tests = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)}
    return [path for path, text in tests.items() if page in text and named.search(text)]


def test_a_block_that_no_test_runs_is_found():
    assert runners("sharded.md", "torchrun") and not runners("sharded.md", "elsewhere")


def is_python(text: str) -> bool:
    """Return whether a text is Python that does something: a drawing, an output or a list of words is not."""
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Assign | ast.Import | ast.ImportFrom | ast.Call) for node in ast.walk(tree))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_says_why_not(page):
    for block in blocks(page):
        where = f"{page.name}: ```{block.language} {block.word}\n{block.text}"
        if block.reason or block.language in ("diff", "text", "json"):
            continue
        if block.language == "python":
            assert not block.word or runners(page.name, block.word), f"{where}: no test runs it"
        elif block.language in ("sh", "bash"):
            others = [line for line in logical_lines(block.text) if not line.startswith("laconic ")]
            assert not others, f"{where}\n{others} are not run: say why in a comment above the block"
        else:
            assert not block.language, f"{where}: write python, sh, diff, text or nothing"
            assert not is_python(block.text), f"{where}\nthis is Python: let it run, or say why not"


def test_python_in_disguise_is_found():
    assert is_python("x = 1\n") and not is_python("step-00000020/\n  manifest.json\n") and not is_python("ok\n")


def logical_lines(text: str) -> list[str]:
    joined = re.sub(r"\\\n\s*", " ", text)
    parts = [part.strip() for line in joined.splitlines() for part in re.split(r" && ", line)]
    return [re.sub(r"\s+#.*$", "", part) for part in parts if part and not part.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_laconic_parse(page):
    known = commands()
    for block in blocks(page):
        if block.language not in ("sh", "bash", ""):
            continue
        for line in logical_lines(block.text):
            if re.match(r"laconic [a-z]+( |$)", line) and not line.startswith("laconic --"):
                _, name, *arguments = shlex.split(line)
                if name in known:
                    known[name].make_context(name, arguments)
                else:
                    assert block.language == "", f"{page.name}: there is no command laconic {name}"
