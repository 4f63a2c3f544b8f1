"""The distribution's name, in one place; what is said where the other project called `laconic` is installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import laconic
from laconic.tools.doctor.checks import check_distributions
from laconic.tools.machine import DISTRIBUTION, other_project, pip_install
from tests.cli.conftest import here

__all__ = ["here"]

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".sh", ".cff", ".cfg", ".ipynb", ".html", ".svg", ""}
OTHER = re.compile(r"""laconic\[|\b(?<!un)(?:install|add|download)\b[^\n`;&|]*?["' =]laconic(?![-\w./:])""")
"""An extra of the other project, or a command that installs it."""


def _files(folder: Path) -> Iterator[Path]:
    hidden = {".github", ".ci"}
    for path in sorted(folder.iterdir()):
        generated = path.name in ("build", "dist", "__pycache__", "runs", "wandb", "mlruns")
        if generated or (path.name.startswith(".") and path.name not in hidden):
            continue
        if path.is_dir():
            yield from _files(path)
        elif path.suffix in TEXT:
            yield path


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("pip install laconic", True),
        ('pip install -c constraints.txt "laconic>=0.1"', True),
        ("uv add laconic", True),
        ('needs laconic["ray"]'.replace('"', ""), True),
        ("pip install -U torch laconic", True),
        ('pip install "laconic-train[report]"', False),
        ("pip uninstall laconic, then", False),
        ("pip install . && laconic --version", False),
        ("`pip install .`, then `laconic compare`", False),
    ],
)
def test_what_is_forbidden(line, wrong):
    assert bool(OTHER.search(line)) == wrong


def test_nothing_in_the_repository_installs_the_other_project():
    files = [path for path in _files(ROOT) if path != Path(__file__)]
    assert {ROOT / "README.md", ROOT / "pyproject.toml", ROOT / "examples/cluster/torchft.sh"} <= set(files)
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if OTHER.search(line)
    ]
    assert found == []


def test_the_name_is_one_constant():
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["scripts"] == {"laconic": "laconic.cli.main:main"}
    sources = (ROOT / "laconic").rglob("*.py")
    assert [path.name for path in sources if DISTRIBUTION in path.read_text()] == ["machine.py"]


@pytest.mark.parametrize(
    "page", [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"], ids=lambda path: path.name
)
def test_pages_name_extras_that_there_are(page):
    for extra in re.findall(rf"{DISTRIBUTION}\[(\w+)\]", page.read_text()):
        assert extra in PROJECT["optional-dependencies"]
        assert pip_install(extra) in page.read_text()


def _installed(folder: Path, name: str) -> None:
    place = folder / f"{name}-0.14.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.14.0\n")


def test_the_other_project_is_reported(here, tmp_path, monkeypatch):
    _installed(tmp_path, "laconic")
    monkeypatch.syspath_prepend(str(tmp_path))
    [found] = check_distributions()
    assert (found.name, found.severity) == ("distributions", "warning")
    assert found.found == 'the distribution "laconic" 0.14.0 is installed beside laconic-train'
    assert "overwrite" in found.why
    assert found.way_out.startswith("pip uninstall laconic, then install laconic-train again")
    ended = here("--version")
    assert (ended.code, ended.out) == (0, f"laconic {laconic.__version__}\n")
    assert ended.err == f"laconic: {found.found}. {found.why} {found.way_out}\n"


def test_the_command_says_whose_package_it_found(tmp_path):
    """The other project was installed later: its `__init__.py` lies over ours."""
    _installed(tmp_path, "laconic")
    (tmp_path / "laconic").mkdir()
    (tmp_path / "laconic" / "__init__.py").write_text(f"__path__.append({str(ROOT / 'laconic')!r})\n")
    command = [sys.executable, "-m", "laconic", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert 'ImportError: laconic: the distribution "laconic" 0.14.0 is installed beside laconic-train.' in done.stderr


def test_nothing_is_reported_without_it(here, tmp_path, monkeypatch):
    _installed(tmp_path, "laconic_train")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert other_project() is None
    assert check_distributions() == []
    assert here("--version").err == ""
