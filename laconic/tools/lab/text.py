"""Text to train on, as bytes: the source of the Python standard library, which needs no download, or the user's files.

A file belongs to training or to validation as a whole, because neighbouring lines are alike. The names of the files
decide the split, so it is the same on every worker and in every run.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from laconic.tools.errors import UsageError

MOST_BYTES = 8_000_000  # enough for the lab's models
VALIDATION_SHARE = 0.1
NOT_LIBRARY = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})

Files = dict[str, bytes]  # the contents of files by name


def load(data: Path | None, context: int) -> tuple[Tensor, Tensor]:
    """Load the text at `data`, or Python's standard library if None: bytes for training and for validation, uint8."""
    if data is None:
        root = Path(sysconfig.get_path("stdlib"))
        train, validation = split_by_file(root, files_under(root, ".py", NOT_LIBRARY))
    elif data.is_dir():
        train, validation = split_by_file(data, files_under(data))
    elif data.is_file():
        train, validation = split_one_file(data)
    else:
        raise UsageError(
            f"--data {data}: there is no such file or folder. Give a text file or a folder of them, or leave "
            "out --data to train on the source of Python's standard library."
        )
    texts = [b"\n".join(files.values()) for files in (train, validation)]
    _check_size([len(text) for text in texts], data, context)
    train_text, validation_text = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts)
    return train_text, validation_text


def files_under(root: Path, ending: str = "", skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root` with that ending, without hidden files and the skipped folders."""
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped and not name.startswith(".")]
        yield from (Path(folder, name) for name in names if name.endswith(ending) and not name.startswith("."))


def split_by_file(root: Path, paths: Iterable[Path]) -> tuple[Files, Files]:
    """Read files for training and for validation, in the order of a digest of their names.

    The first tenth of the bytes is for validation. Unreadable and binary files are left out.
    """
    names = {path.relative_to(root).as_posix(): path for path in paths}
    contents: Files = {}
    room = MOST_BYTES
    for name in sorted(names, key=_digest):
        if room and (content := _read(names[name], room)):
            contents[name] = content
            room -= len(content)
    wanted = sum(map(len, contents.values())) * VALIDATION_SHARE
    validation: Files = {}
    while len(contents) > 1 and sum(map(len, validation.values())) < wanted:
        first = next(iter(contents))
        validation[first] = contents.pop(first)
    return contents, validation


def split_one_file(path: Path) -> tuple[Files, Files]:
    """Use the last tenth of a single file for validation."""
    content = _read(path, MOST_BYTES)
    cut = len(content) - int(len(content) * VALIDATION_SHARE)
    return {path.name: content[:cut]}, {path.name: content[cut:]}


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


def _check_size(sizes: Sequence[int], data: Path | None, context: int) -> None:
    if min(sizes) > context:
        return
    written, way_out = f"--data {data}", "Give more text (binary and unreadable files do not count)"
    if data is None:
        written, way_out = "this Python's standard library", "Give your own text with --data PATH"
    raise UsageError(
        f"{written}: {sizes[0]} bytes of text to train on and {sizes[1]} to validate on, but --context {context} needs "
        f"at least {context + 1} of each. {way_out}, or use a smaller --context."
    )
