"""Files are written whole, or left as they are."""

from __future__ import annotations

import os

import pytest

from laconic.atomic_write import write_atomically


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(OSError):
        write_atomically(tmp_path / "folder", b"new")
    assert os.listdir(tmp_path) == ["folder"] and os.listdir(tmp_path / "folder") == ["inside"]
    with pytest.raises(OSError):
        write_atomically(tmp_path / "missing" / "file", b"new")
