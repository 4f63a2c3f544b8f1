"""The source files of the repository, read once."""

from __future__ import annotations

from pathlib import Path

import pytest
from laconic_site.names import Source, read_sources


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    return read_sources(Path(__file__).parents[2])
