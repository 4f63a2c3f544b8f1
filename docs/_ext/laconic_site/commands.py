"""The command line, read from the commands themselves: their options as data, and as Markdown for the reference."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from laconic_site.keywords import Option


def commands() -> dict[str, Any]:
    """Return the subcommands of `laconic` by name."""
    from laconic.cli.main import COMMANDS, make_app

    found: dict[str, Any] = typer.main.get_command(make_app(*COMMANDS)).commands  # type: ignore[attr-defined]
    return found


def options(root: Path) -> Iterator[Option]:
    """Yield every option of every command, with the line of its parameter."""
    for name, command in commands().items():
        function = inspect.unwrap(command.callback)
        path = Path(inspect.getfile(function)).relative_to(root).as_posix()
        lines = _parameter_lines(root / path, function.__name__)
        for parameter in command.params:
            line = lines.get(parameter.name, function.__code__.co_firstlineno)
            for option in _names(parameter):
                yield Option(option, f"laconic {name}", path, line, parameter.help or "")


def reference() -> str:
    """Return the reference of all commands in MyST Markdown: a section for each, its options by panel."""
    return "\n".join(part for name, command in commands().items() for part in _command(name, command))


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(name, [], resilient_parsing=True)
    yield f"## laconic {name}\n"
    yield f"```{{program}} laconic {name}\n```\n"
    yield inspect.cleandoc(command.help or "") + "\n"
    yield f"```text\nlaconic {name} {' '.join(command.collect_usage_pieces(context))}\n```\n"
    panels: dict[str, list[str]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            panel = getattr(parameter, "rich_help_panel", None) or "Options"
            panels.setdefault(panel, []).append(_parameter(parameter, *parameter.get_help_record(context)))
    for panel, parameters in panels.items():
        yield f"**{panel}**\n" if len(panels) > 1 else ""
        yield from parameters


def _parameter(parameter: Any, usage: str, text: str) -> str:
    """Return one parameter, from the record that `--help` shows."""
    text, _, default = text.partition("  [default: ")
    text = re.sub(r"([*_`<\[])", r"\\\1", text)
    if default:
        text += f" Default: `{default.rstrip(']')}`."
    kind = re.sub(r"list\[(\w+)\]", r"\1", usage.partition(" <")[2].rstrip(">")).lower()
    names = _names(parameter)
    if not names:
        return f"`{parameter.name}`: {text}\n"
    return f"```{{option}} {', '.join(f'{each} <{kind}>' if kind else each for each in names)}\n{text}\n```\n"


def _names(parameter: Any) -> list[str]:
    given = [*parameter.opts, *parameter.secondary_opts]
    return [each for each in given if each.startswith("-")]


def _parameter_lines(path: Path, function: str) -> dict[str, int]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return {each.arg: each.lineno for each in [*node.args.args, *node.args.kwonlyargs]}
    return {}
