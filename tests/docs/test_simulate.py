"""docs/simulate.md: its commands parse, and its function trains."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import torch
import typer

from laconic import ddp
from laconic.cli.main import make_app
from laconic.tools.simulate.training import SimulatedRun, SimulatedTask, Training

PAGE = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_commands_parse():
    simulate = typer.main.get_command(make_app("simulate")).commands["simulate"]  # type: ignore[attr-defined]
    lines = [line for block in _blocks("bash") for line in block.splitlines()]
    assert lines
    for line in lines:
        assert line.startswith("laconic simulate ")
        simulate.make_context("simulate", shlex.split(line)[2:])


def test_the_function_trains():
    names: dict[str, object] = {"torch": torch}
    exec(_blocks("python")[0], names)  # noqa: S102 - the page's own code
    torch.manual_seed(0)
    steps = list(Training(SimulatedRun(ddp(), 3, 30, lr=0.1), SimulatedTask(*names["make"]())).steps())  # type: ignore[operator]
    assert steps[-1].loss < steps[0].loss / 4
