"""Text: split by file, the same everywhere, and clear about what is missing."""

import os

import pytest
import torch

from laconic.compare import text
from laconic.compare.settings import LabError


@pytest.fixture
def folder(tmp_path):
    """Twenty files of a hundred bytes, each of one letter; a hidden one, a binary one and an empty one."""
    for index in range(20):
        (tmp_path / f"{index}.txt").write_bytes(bytes([65 + index]) * 100)
    (tmp_path / ".hidden").write_bytes(b"h" * 100)
    (tmp_path / "binary").write_bytes(b"\0" * 100)
    (tmp_path / "empty").touch()
    return tmp_path


def test_the_standard_library_is_there_and_split_by_file():
    library = text.load(None, context=128)
    assert len(library.train) > 1_000_000
    assert len(library.validation) > 100_000
    assert not set(library.train_files) & set(library.validation_files)
    assert not [name for name in library.train_files if "site-packages" in name or name.startswith("test/")]


def test_a_folder_is_split_by_file_and_always_the_same_way(folder):
    one, two = text.load(folder, context=16), text.load(folder, context=16)
    assert torch.equal(one.train, two.train)
    assert torch.equal(one.validation, two.validation)
    assert len(one.validation_files) == 2
    assert len(one.train_files) == 18
    letters = set(one.train.tolist()) & set(one.validation.tolist())
    assert letters <= {ord("\n")}


def test_hidden_binary_and_empty_files_are_left_out(folder):
    found = text.load(folder, context=16)
    assert not {".hidden", "binary", "empty"} & {*found.train_files, *found.validation_files}


def test_the_order_in_which_a_folder_is_listed_does_not_matter(folder):
    paths = sorted(text.files_under(folder))
    assert torch.equal(text.split_by_file(folder, paths).train, text.split_by_file(folder, paths[::-1]).train)


def test_no_more_is_read_than_needed(folder, monkeypatch):
    monkeypatch.setattr(text, "MOST_BYTES", 250)
    found = text.load(folder, context=16)
    assert [len(found.train_files), len(found.validation_files)] == [2, 1]


def test_one_file_gives_its_last_tenth(tmp_path):
    path = tmp_path / "book.txt"
    path.write_bytes(b"a" * 900 + b"b" * 100)
    found = text.load(path, context=16)
    assert set(found.train.tolist()) == {ord("a")}
    assert set(found.validation.tolist()) == {ord("b")}


def test_a_missing_path(tmp_path):
    with pytest.raises(LabError, match=r"--data .*nowhere: there is no such file or folder. Give .* leave out"):
        text.load(tmp_path / "nowhere", context=16)


def test_too_little_text(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(LabError, match=r"needs at least 129 of each. Give more text .* a smaller --context"):
        text.load(tmp_path / "a.txt", context=128)
    with pytest.raises(LabError, match=r"5 bytes of text to train on and 0 to validate on"):
        text.load(tmp_path, context=128)


def test_an_empty_folder(tmp_path):
    with pytest.raises(LabError, match=r"0 bytes of text to train on"):
        text.load(tmp_path, context=128)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_left_out(folder):
    (folder / "0.txt").chmod(0)
    found = text.load(folder, context=16)
    assert "0.txt" not in {*found.train_files, *found.validation_files}


def test_batches_repeat_for_the_same_seed_and_differ_for_any_other():
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
