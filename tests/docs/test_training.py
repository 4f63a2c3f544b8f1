"""docs/training.md: the snippets that need several workers, each in real processes over gloo."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch

from tests.workers import run_workers

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
SNIPPETS = dict(re.findall(r"^```python (\w+)\n(.*?)^```", PAGE, re.M | re.S))


def _run(worker: int, text: str) -> tuple[int, float]:
    names: dict[str, object] = {}
    warnings.simplefilter("ignore", DeprecationWarning)  # torch.compile's own
    exec(compile(text, "training.md", "exec", dont_inherit=True), names)  # noqa: S102 - the page's own code
    session, model = names.get("session"), names.get("model")
    step = session.step if session is not None else 0  # type: ignore[attr-defined]
    weights = [p.detach() for p in model.parameters()] if isinstance(model, torch.nn.Module) else []
    return step, sum(p.to_local().sum().item() if hasattr(p, "to_local") else p.sum().item() for p in weights)


@pytest.mark.parametrize(
    ("word", "workers"),
    [
        *[("accumulate", 2), ("validate", 2), ("stop", 2), ("twice", 2), ("tensor", 4)],
        pytest.param("compile", 2, marks=pytest.mark.slow),
    ],
)
def test_snippets_run_on_all_workers(word, workers):
    """`python accumulate`, `python validate`, `python stop`, `python twice`, `python tensor`, `python compile`."""
    found = run_workers(_run, workers, (SNIPPETS[word],), timeout_s=200)
    assert len({step for step, _ in found}) == 1
    halves = {"tensor": 2}.get(word, 1)  # workers of a machine hold other shards
    for shard in range(halves):
        assert len({total for _, total in found[shard::halves]}) == 1, "their weights are equal"


def test_accumulating_without_no_sync_sends_more():
    text = SNIPPETS["accumulate"].replace("model.no_sync() if batch < batches - 1 else nullcontext()", "nullcontext()")
    assert text != SNIPPETS["accumulate"]
    once, each = (sum(run_workers(_sent, 2, (each,))) for each in (SNIPPETS["accumulate"], text))
    assert each == 4 * once


def _sent(worker: int, text: str) -> int:
    names: dict[str, object] = {}
    exec(compile(text, "training.md", "exec", dont_inherit=True), names)  # noqa: S102 - the page's own code
    return names["session"].ledger.totals(by="phase")["gradient"].wire_bytes  # type: ignore[attr-defined,no-any-return]
