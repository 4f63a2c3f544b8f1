"""The README and the docs are correct: Python blocks run, the diff is a program, links and plans are valid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import laconic

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for block in blocks(page, "python"):
        exec(compile(block, page.name, "exec"), {})  # noqa: S102 - the documentation's own code


def test_the_diff_is_a_program():
    block = blocks(ROOT / "README.md", "diff")[0]
    added = [line[2:] for line in block.splitlines() if line.startswith("+")]
    assert [line.split("(")[0] for line in added] == ["import laconic", "laconic.attach"]
    program = "\n".join(line[2:] for line in block.splitlines())

    class Model(nn.Linear):
        def forward(self, batch: Tensor) -> Tensor:
            return super().forward(batch).square().mean()

    model = Model(8, 8)
    before = model.weight.detach().clone()
    names = {"torch": torch, "model": model, "DDP": lambda module: module, "data": torch.randn(3, 4, 8)}
    exec(compile(program, "README.md", "exec"), names)  # noqa: S102
    assert not torch.equal(before, model.weight)


def test_every_linked_file_exists():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_plans_named_in_the_readme_parse():
    for text in re.findall(r"^\| `(\w+\([^`]*\))` \|", (ROOT / "README.md").read_text(), re.M):
        if "schedule, codec" not in text:
            assert laconic.plan(text)
