"""A script as bytes, text and syntax tree, with positions that edits can use.

The text keeps the file's line ends, encoding and byte-order mark, so that writing it back unchanged gives the same
bytes. `write` replaces the file in one step, through a temporary file beside it, and only by text that parses.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tempfile
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")


class ScriptError(ValueError):
    """The script cannot be read as Python."""


@dataclass(frozen=True)
class Edit:
    """Put `text` in the place of the characters from `start` up to `end`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Script:
    """A parsed script; `text` has the file's own line ends."""

    path: Path
    text: str
    encoding: str = "utf-8"

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree; a script that does not parse raises `ScriptError` with the line."""
        try:
            return ast.parse(self.text)
        except SyntaxError as error:
            raise ScriptError(
                f"{self.path}:{error.lineno or 1}: {error.msg}. Only a script that Python can parse is read; "
                "nothing was changed. Mend this line first."
            ) from error
        except (ValueError, RecursionError, MemoryError) as error:
            raise ScriptError(
                f"{self.path}:1: it cannot be parsed ({error}). Only a script that Python can parse is read; nothing "
                "was changed. Is it a Python script at all?"
            ) from error

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The lines with their ends, divided where Python's own parser divides them."""
        return tuple(_LINE.findall(self.text))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        starts = [0]
        for line in self.lines:
            starts.append(starts[-1] + len(line))
        return tuple(starts)

    def position(self, line: int, byte_column: int) -> int:
        """The index in `text` of a place that the syntax tree gives as line and UTF-8 column."""
        before = self.lines[line - 1].encode()[:byte_column].decode()
        return self._starts[line - 1] + len(before)

    def span(self, node: ast.stmt | ast.expr | ast.alias) -> tuple[int, int]:
        """The indices in `text` where a node begins and ends."""
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self.position(node.lineno, node.col_offset), self.position(end_line, end_column)

    def source(self, node: ast.stmt | ast.expr | ast.alias) -> str:
        """A node as it is written."""
        start, end = self.span(node)
        return self.text[start:end]

    @property
    def newline(self) -> str:
        """The line end of the first line."""
        first = self.lines[0] if self.lines else "\n"
        return first[len(first.rstrip("\r\n")) :] or "\n"

    def edited(self, edits: Iterable[Edit]) -> Script:
        """The script with these edits, which must not overlap; its text must parse."""
        text = self.text
        for edit in sorted(edits, key=lambda each: (each.start, each.end), reverse=True):
            text = text[: edit.start] + edit.text + text[edit.end :]
        changed = Script(self.path, text, self.encoding)
        changed.tree  # noqa: B018  raises ScriptError where an edit would break the script
        return changed


def read_script(path: str | os.PathLike[str]) -> Script:
    """The script in a file; `ScriptError` if it is not Python, `OSError` if it cannot be read."""
    path = Path(path)
    if path.suffix == ".ipynb":
        raise ScriptError(
            f"{path}: a notebook is not a script. Export it first: jupyter nbconvert --to script {path.name}"
        )
    data = path.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeError) as error:
        raise ScriptError(
            f"{path}:1: its encoding cannot be read ({error}). Python reads a script in the encoding that its "
            "first two lines name, or else UTF-8. Save it so."
        ) from error
    return Script(path, text, encoding)


def write(script: Script) -> None:
    """Put the script in its file's place in one step; the file's mode is kept, and a link stays a link."""
    target = Path(os.path.realpath(script.path))
    mode = target.stat().st_mode
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(script.text.encode(script.encoding))
            file.flush()
            os.fchmod(file.fileno(), mode & 0o7777)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
