"""README and docs tell the truth: their Python runs as pasted, their links lead somewhere, their plans parse."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_readmes_first_program_runs_as_pasted(tmp_path):
    (program,) = blocks(ROOT / "README.md", "python torchrun")
    new = [line for line in program.splitlines() if line.endswith("  # new")]
    assert [line.partition("laconic")[2].split("(")[0].split()[0] for line in new] == ["#", ".attach"]
    (tmp_path / "train.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "train.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"^loss ([\d.]+), ([\d,]+) bytes sent by worker \d$", done.stdout, re.M)
    assert len(found) == 4
    assert all(float(loss) < 30 for loss, _ in found), "it starts at about 64"
    exact = 1.5 * 200 * 4 * (64 * 256 + 256 + 256 + 1)
    assert all(int(sent.replace(",", "")) < exact / 7 for _, sent in found)


def test_every_linked_file_exists():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_plans_named_in_the_readme_parse():
    for text in re.findall(r"^\| `(\w+\([^`]*\))` \|", (ROOT / "README.md").read_text(), re.M):
        if "schedule, codec" not in text:
            assert laconic.plan(text)
