"""Text to train on, as bytes: the source of the Python standard library, which needs no download, or the user's files.

A file belongs to training or to validation as a whole, because neighbouring lines are alike. The names of the files
decide the split, so it is the same on every worker and in every run.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from laconic.compare.settings import LabError

MOST_BYTES = 8_000_000  # enough for the lab's models
VALIDATION_SHARE = 0.1
NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Text:
    """Bytes for training and for validation, each [length] uint8, and the names of their files."""

    train: Tensor
    validation: Tensor
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]


def load(data: Path | None, context: int) -> Text:
    """Load the text at `data`, or Python's standard library if that is None."""
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        text = split_by_file(root, files_under(root, ".py", NOT_LIBRARY))
    elif data.is_dir():
        text = split_by_file(data, files_under(data))
    elif data.is_file():
        text = split_one_file(data)
    else:
        raise LabError(
            f"--data {data}: there is no such file or folder. Give a text file or a folder of them, or leave "
            "out --data to train on the source of Python's standard library."
        )
    _check_size(text, data, context)
    return text


def files_under(root: Path, ending: str = "", skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root` with that ending, without hidden files and the skipped folders."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if name.endswith(ending) and not name.startswith("."))


def split_by_file(root: Path, paths: Iterable[Path]) -> Text:
    """Split files between validation and training, in the order of a digest of their names.

    The first tenth of the bytes is for validation. Unreadable and binary files are left out.
    """
    names = {path.relative_to(root).as_posix(): path for path in paths}
    contents: list[tuple[str, bytes]] = []
    room = MOST_BYTES
    for name in sorted(names, key=_digest):
        if room == 0:
            break
        content = _read(names[name], room)
        if content:
            contents.append((name, content))
            room -= len(content)
    cut = _validation_count([len(content) for _, content in contents])
    return _text(contents[cut:], contents[:cut])


def split_one_file(path: Path) -> Text:
    """Use the last tenth of a single file for validation."""
    content = _read(path, MOST_BYTES)
    cut = len(content) - int(len(content) * VALIDATION_SHARE)
    return _text([(path.name, content[:cut])], [(path.name, content[cut:])])


def batch(source: Tensor, size: int, context: int, seed: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Random sequences of `source`: inputs and the bytes that follow, each [size, context] int64.

    `seed` is a sequence such as (seed, worker, step).

    >>> inputs, targets = batch(torch.arange(100, dtype=torch.uint8), size=2, context=3, seed=(0, 1, 2))
    >>> bool((targets == inputs + 1).all())
    True
    """
    starts = torch.randint(len(source) - context, (size,), generator=generator(seed))
    rows = source[starts[:, None] + torch.arange(context + 1)].long()  # [size, context + 1]
    return rows[:, :-1], rows[:, 1:]


def generator(seed: Sequence[int]) -> torch.Generator:
    """Make a generator for a sequence of numbers, such as (seed, worker, step)."""
    digest = _digest(" ".join(map(str, seed)))
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()


def _read(path: Path, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(most)
    except OSError:
        return b""
    return b"" if b"\0" in content else content


def _validation_count(sizes: Sequence[int]) -> int:
    """The number of first files that reach the validation share; at least one file is left for training."""
    wanted = sum(sizes) * VALIDATION_SHARE
    count, reached = 0, 0
    while count < len(sizes) - 1 and reached < wanted:
        reached += sizes[count]
        count += 1
    return count


def _text(train: Sequence[tuple[str, bytes]], validation: Sequence[tuple[str, bytes]]) -> Text:
    names = [tuple(name for name, _ in part) for part in (train, validation)]
    return Text(_tensor(train), _tensor(validation), *names)


def _tensor(contents: Sequence[tuple[str, bytes]]) -> Tensor:
    joined = bytearray(b"\n".join(content for _, content in contents))
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


def _check_size(text: Text, data: Path | None, context: int) -> None:
    least = context + 1
    if len(text.train) >= least and len(text.validation) >= least:
        return
    if data is None:
        written, way_out = "this Python's standard library", "Give your own text with --data PATH"
    else:
        written, way_out = f"--data {data}", "Give more text (binary and unreadable files do not count)"
    raise LabError(
        f"{written}: {len(text.train)} bytes of text to train on and {len(text.validation)} to validate on, "
        f"but --context {context} needs at least {least} of each. {way_out}, or use a smaller --context."
    )
