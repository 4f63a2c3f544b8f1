"""Text: split by file, the same everywhere, with errors that tell what is missing."""

import os
import sysconfig
from pathlib import Path

import pytest
import torch

from laconic.tools.errors import UsageError
from laconic.tools.lab import text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twenty files of a hundred bytes, each of one letter; a hidden one, a binary one and an empty one."""
    for index in range(20):
        (tmp_path / f"{index}.txt").write_bytes(bytes([65 + index]) * 100)
    (tmp_path / ".hidden").write_bytes(b"h" * 100)
    (tmp_path / "binary").write_bytes(b"\0" * 100)
    (tmp_path / "empty").touch()
    return tmp_path


def split(folder: Path) -> tuple[text.Files, text.Files]:
    return text.split_by_file(folder, text.files_under(folder))


def test_the_standard_library_is_split_by_file():
    train, validation = text.load(None, context=128)
    assert len(train) > 1_000_000
    assert len(validation) > 100_000
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root).as_posix() for path in text.files_under(root, ".py", text.NOT_LIBRARY)]
    assert len(files) > 100
    assert not [name for name in files if "site-packages" in name or name.startswith("test/")]


def test_a_folder_is_split_by_file_and_always_the_same_way(folder):
    one, two = text.load(folder, context=16), text.load(folder, context=16)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    train, validation = split(folder)
    assert (len(train), len(validation)) == (18, 2)
    assert not set(train) & set(validation)
    assert set(one[0].tolist()) & set(one[1].tolist()) <= {ord("\n")}


def test_hidden_binary_and_empty_files_are_left_out(folder):
    train, validation = split(folder)
    assert not {".hidden", "binary", "empty"} & {*train, *validation}


def test_the_order_of_the_listing_does_not_matter(folder):
    paths = sorted(text.files_under(folder))
    forward, backward = text.split_by_file(folder, paths), text.split_by_file(folder, paths[::-1])
    assert [list(files.items()) for files in forward] == [list(files.items()) for files in backward]


def test_no_more_is_read_than_needed(folder, monkeypatch):
    monkeypatch.setattr(text, "MOST_BYTES", 250)
    assert [len(files) for files in split(folder)] == [2, 1]


def test_the_last_tenth_of_one_file_is_for_validation(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    train, validation = text.load(path, context=16)
    assert set(train.tolist()) == {ord("a")}
    assert set(validation.tolist()) == {ord("b")}


def test_a_missing_path(tmp_path):
    with pytest.raises(UsageError, match=r"--data .*nowhere: there is no such file or folder. Give .* leave out"):
        text.load(tmp_path / "nowhere", context=16)


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(UsageError, match=r"needs at least 129 of each. Give more text .* a smaller --context"):
        text.load(tmp_path / "a.txt", context=128)
    with pytest.raises(UsageError, match=r"5 bytes of text to train on and 0 to validate on"):
        text.load(tmp_path, context=128)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UsageError, match=r"0 bytes of text to train on"):
        text.load(tmp_path, context=128)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_left_out(folder):
    (folder / "0.txt").chmod(0)
    train, validation = split(folder)
    assert "0.txt" not in {*train, *validation}


def test_batches_depend_on_the_whole_seed():
    source = torch.arange(200, dtype=torch.uint8)
    first = text.batch(source, 4, 8, (0, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, text.batch(source, 4, 8, (0, 1, 2)), strict=True))
    for other in [(1, 1, 2), (0, 2, 2), (0, 1, 3), (0, 12), (2, 1, 0)]:
        assert not torch.equal(first[0], text.batch(source, 4, 8, other)[0])


def test_batches_reach_both_ends():
    source = torch.arange(10, dtype=torch.uint8)
    inputs, targets = text.batch(source, 500, 8, (0,))
    assert inputs.min() == 0
    assert targets.max() == 9
    assert inputs.shape == targets.shape == (500, 8)
