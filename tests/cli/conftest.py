"""Fixtures that run the command: in this process, which is quick, or as a user does."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from laconic.cli.main import main

ROOT = Path(__file__).parents[2]
TINY = ["--layers", "1", "--width", "32", "--context", "32"]


@dataclass(frozen=True)
class Ended:
    """The exit code of a command, and its output."""

    code: int
    out: str
    err: str


Run = Callable[..., Ended]


@pytest.fixture
def here(monkeypatch, capsys) -> Run:
    """Run `laconic` with these arguments in this process."""

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["laconic", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return Ended(int(ended.value.code or 0), output.out, output.err)

    return run


@pytest.fixture
def outside() -> Run:
    """Run `python` with these arguments, from the root of the repository."""

    def run(*arguments: str) -> Ended:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def tiny() -> list[str]:
    """Options of a very small model."""
    return TINY
