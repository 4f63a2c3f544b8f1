"""The size of a header, in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laconic.checks.headers import HEADER_BYTES


@pytest.mark.parametrize("page", ["faults.md", "glossary.md"])
def test_pages_say_how_many_bytes_a_header_has(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert re.search(rf"header of {HEADER_BYTES} bytes|{HEADER_BYTES} bytes that workers exchange before", text)
