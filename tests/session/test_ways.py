"""The functions between a tensor and its collective are those of the table in docs/architecture.md."""

from __future__ import annotations

import pytest

from tests.ways import PAGE, WAYS, Way, counts, follow, on_page
from tests.workers import run_workers


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.plan)
def test_the_page_says_what_is_measured(way: Way):
    for called in run_workers(follow, 2, (way,)):
        assert any(name == way.start for _, name in called)
        assert ("comm/collectives.py", "launch") in called
        said = on_page(PAGE.read_text())[way.what]
        assert counts(called) == said, "run python -m tests.ways, which writes docs/architecture.md"
