"""The pages of the site agree with the code and with each other."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from laconic_site.glossary import read_terms
from laconic_site.keywords import public_names

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.mark.slow
def test_the_first_script_runs(tmp_path):
    (program,) = re.findall(r"^```python torchrun\n(.*?)^```", (DOCS / "start.md").read_text(), re.M | re.S)
    (tmp_path / "train.py").write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    done = subprocess.run(torchrun, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    (loss, sent) = re.findall(r"^quantized_ddp\(bits=4\): loss ([\d.]+), ([\d,]+) bytes", done.stdout, re.M)[0]
    exact = 100 * 4 * (64 * 256 + 256 + 256 + 1)
    assert float(loss) < 30, "it starts at about 64"
    assert int(sent.replace(",", "")) < exact / 6


def test_the_api_reference_has_every_public_name(sources):
    public = public_names(source for source in sources if not source.module.startswith("laconic.integrations"))
    pages = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = set(re.findall(r"^\.\. auto\w+:: laconic\.(?:\w+\.)*(\w+)$", pages, re.M))
    whole = set(re.findall(r"^\.\. automodule:: (\S+)\n   :members:", pages, re.M))
    documented |= {name for source in sources if source.module in whole for name in source.exports}
    assert len(public) > 90
    assert public <= documented


def test_terms_name_code_that_exists(sources):
    defined = {d.name for source in sources for d in source.definitions} | {"laconic"}
    terms = read_terms((DOCS / "glossary.md").read_text())
    assert len(terms) > 40
    assert [term.name for term in terms] == sorted((term.name for term in terms), key=str.lower)
    for term in terms:
        assert term.code, f"{term.name}: name the code that it stands for"
        assert set(term.code) <= defined, term


def test_pictures_are_those_that_the_script_draws():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None and spec.loader is not None
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    for name, draw in pictures.PICTURES.items():
        assert (DOCS / "images" / f"{name}.svg").read_text() == draw().svg(), "run: python docs/pictures.py"
    assert len(re.findall("<circle", pictures.front().svg())) == 9  # one for each plan of the front


def test_numbers_that_are_repeated_are_the_same():
    choosing, compare = (DOCS / "choosing.md").read_text(), (DOCS / "compare.md").read_text()
    table = choosing.partition("## By link")[2].partition("## By optimizer")[0]
    seconds = re.findall(r"\| ([\d.]+) \| ([\d.]+) \|", table)
    assert len(seconds) == 3
    for fast, slow in seconds:
        assert fast in compare and slow in compare, (fast, slow)
    readme, start = (ROOT / "README.md").read_text(), (DOCS / "start.md").read_text()
    assert "7.8x" in readme and "7.8x" in start
