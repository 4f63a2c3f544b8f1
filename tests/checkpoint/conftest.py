"""These tests write thousands of small files and fsync each, so their folders are in memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laconic import checkpoint


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture
def place(tmp_path: Path, monkeypatch) -> Path:
    """The folder of a good checkpoint, beside an older one that can be used instead."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoints"
    checkpoint.save(folder, {"w": torch.zeros(4), "n": 1}, step=1)
    checkpoint.save(folder, {"w": torch.ones(4), "n": 2}, step=2)
    return folder / "step-00000002"
