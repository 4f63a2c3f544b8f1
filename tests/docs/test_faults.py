"""The table of faults names existing tests, at least one for each fault that laconic handles."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_fault_has_tests_that_exist():
    rows = re.findall(r"^\| (F\d+) \|.*\|([^|]*)\|$", (ROOT / "docs" / "faults.md").read_text(), re.M)
    assert [name for name, _ in rows] == [f"F{number}" for number in range(1, 18)]
    for name, cell in rows:
        named = re.findall(r"`(\w+/test_\w+\.py)`", cell)
        assert bool(named) == (name != "F17"), name
        for path in named:
            assert "def test_" in (ROOT / "tests" / path).read_text(), path
