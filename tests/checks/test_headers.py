"""The size of a header, in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laconic.checks.headers import HEADER_BYTES, Header, Headers


@pytest.mark.parametrize("page", ["faults.md", "glossary.md"])
def test_pages_say_how_many_bytes_a_header_has(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    assert re.search(rf"header of {HEADER_BYTES} bytes|{HEADER_BYTES} bytes that workers exchange before", text)


@pytest.mark.parametrize("page", ["training.md", "glossary.md"])
def test_pages_say_how_many_bytes_a_header_with_a_count_has(page):
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    row = Header(step=0, plan="", count=0).row().nbytes
    assert re.search(rf"header of {row} bytes|row of {row} bytes", text)


def test_shares_are_1_on_average_and_none_where_all_weigh_the_same():
    def shares(*given):
        headers = [Header(step=1, plan="", count=count, finite=finite) for count, finite in given]
        return Headers(tuple(headers)).shares

    assert shares((8, True), (8, True), (8, True), (32, True)) == (4 / 7, 4 / 7, 4 / 7, 16 / 7)
    assert shares((5, True), (5, True)) is None
    assert shares((None, True), (None, True)) is None
    assert shares((0, True), (0, True)) is None
    assert shares((0, True), (3, True)) == (0.0, 2.0)
    assert shares((5, True), (5, False), (5, True)) == (1.5, 0.0, 1.5)
    assert shares((0, True), (7, False), (0, True)) == (1.5, 0.0, 1.5)  # all that are left have counted nothing
