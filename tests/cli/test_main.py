"""Mistakes: one paragraph on stderr, exit code 2, no traceback, no worker started."""

import pytest
import typer

import laconic
from laconic.cli.main import COMMANDS, make_app


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers 0: there must be at least 1."),
        (["--lr", "nan"], "--lr nan: it must be a number above 0."),
        (["--seed", "-1"], "--seed -1: a seed is between 0 and"),
        (["--batch", "0"], "--batch 0: there must be at least 1."),
        (["--steps", "-1"], "--steps -1: there must be at least 1."),
        (["--width", "100"], "--width 100: a GPT of this width has 3 heads"),
        (["--workers", "5000"], "Use --workers 16 or fewer, or laconic simulate."),
        (["--plan", "gossip()"], "gossip"),
        (["--plan", "power_sgd(rank=0)"], "rank must be at least 1"),
        (["--plan", "diloco(every='30s')"], "laconic compare needs as many steps from all workers"),
        (["--plan", "__import__('os').getcwd()"], "__import__"),
        (["--data", "no/such/path"], "--data no/such/path: there is no such file or folder."),
        (["--json", "no/such/folder/out.json"], "--json no/such/folder/out.json: no file can be written in"),
        (["--json", "."], "--json .: that is a folder. Name a file in it, such as results.json."),
        (["--model", "bert"], "--model bert: the lab has gpt and resnet."),
        (["--workers", "many"], "--workers"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_mistakes(here, arguments, words):
    ended = here("compare", *arguments)
    assert ended.code == 2
    assert words in ended.err
    assert "Traceback" not in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--link", "1mbit", "--workers", "0"], "--workers 0: there must be at least 1."),
        (["--link", "1mbit", "--workers", "-3"], "--workers -3: there must be at least 1."),
        (["--link", "1mbit", "--hosts", "0"], "--hosts 0: there must be at least 1."),
        (["--link", "0mbit"], "--link 0mbit: write a rate"),
        (["--link", "0 @ 1mbit"], "--link 0 @ 1mbit: write a number"),
        (["--guard", "on"], "--guard on: it must be one of off, warn, act."),
        (["--guard", "warn", "--script", "x.py"], "--guard warn --script x.py: a script chooses its own."),
        (["--resume"], "--resume: it needs the file with the results so far."),
        (["--seconds", "nan"], "--seconds nan: it must be a number above 0."),
        (["--until-loss", "-inf"], "--until-loss -inf: it must be a number above 0."),
    ],
)
def test_mistakes_of_compare(here, arguments, words):
    ended = here("compare", *arguments)
    assert (ended.code, ended.out) == (2, "")
    assert words in ended.err


def test_torchrun_decides_the_number_of_workers(here, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended = here("probe", "--workers", "2")
    assert ended.code == 2
    assert "--workers 2: torchrun has already started 3. Leave out --workers" in ended.err
    monkeypatch.setenv("RANK", "1")
    assert here("probe", "--workers", "2").err == ""  # worker 0 prints it


def test_version(here):
    ended = here("--version")
    assert (ended.code, ended.out) == (0, f"laconic {laconic.__version__}\n")


def test_help_names_the_commands(here):
    ended = here("--help")
    assert ended.code == 0
    for name, command in typer.main.get_command(make_app(*COMMANDS)).commands.items():  # type: ignore[attr-defined]
        assert f" {name} " in ended.out
        assert command.help.partition("\n")[0] == COMMANDS[name]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["plan", "--help"], []])
def test_what_only_describes_the_command_needs_no_torch(outside, arguments):
    code = """
import sys
from laconic.cli.main import main
try:
    main()
except SystemExit as end:
    heavy = {"torch", "numpy", "laconic.public"} & set(sys.modules)
    sys.exit(f"{end.code} {heavy or 'light'}")
"""
    ended = outside("-c", code, *arguments)
    assert ended.err.strip() in ("0 light", "2 light"), ended


def test_the_library_itself_needs_neither_typer_nor_rich_and_prints_nothing(outside):
    rooms = "{'typer', 'rich', 'laconic.cli', 'laconic.tools.compare'}"
    code = f"import sys, laconic; laconic.attach; sys.exit(bool({rooms} & set(sys.modules)))"
    ended = outside("-W", "error", "-c", code)
    assert (ended.code, ended.out, ended.err) == (0, "", "")
