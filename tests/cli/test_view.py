"""What is seen: plain lines, not too many, or a table with a row for each."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from laconic.cli.view import LiveView, PlainView, Row, SilentView, make_view
from laconic.lab.progress import Progress

LABELS = {Row(0, 0): "ddp()", Row(1, 0): "power_sgd(rank=4)"}
NOW = Progress(worker=0, step=1, steps=200, loss=2.0, tokens_per_s=1234.0, sent_bytes=5000, seconds=1.0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_view_fits_where_stdout_goes(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(make_view(LABELS, plain=False), LiveView)
    assert isinstance(make_view(LABELS, plain=True), PlainView)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert isinstance(make_view(LABELS, plain=False), PlainView)


def test_plain_lines_are_some_ten_for_a_run_and_include_the_last(capsys):
    view = PlainView(LABELS)
    for step in range(1, 201):
        view.progress(Row(0, 0), replace(NOW, step=step))
    view.progress(Row(1, 0), NOW)
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 13
    assert lines[0] == "ddp() step=1/200 loss=2.000 tokens/s=1,234 sent=5 kB left=199s"
    assert lines[-2].startswith("ddp() step=200/200")
    assert lines[-1].startswith("power_sgd(rank=4) step=1/200")


def test_a_reader_that_has_left_does_not_stop_the_run(monkeypatch):
    view = PlainView(LABELS)
    monkeypatch.setattr(Console, "print", _broken)
    view.progress(Row(0, 0), NOW)


def _broken(*arguments: object, markup: bool, soft_wrap: bool) -> None:
    raise BrokenPipeError


def test_the_live_table_fits_eighty_columns_and_shows_who_waits(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    view = LiveView(LABELS)
    view.start()
    view.progress(Row(0, 0), replace(NOW, step=100))
    view.close()
    text = screen.getvalue()
    for words in ("ddp()", "100/200", "2.000", "1,234", "5 kB", "1s", "power_sgd(rank=4)"):
        assert words in text


@pytest.mark.parametrize("call", ["start", "close"])
def test_silence(call, capsys):
    getattr(SilentView(), call)()
    SilentView().progress(Row(0, 0), NOW)
    assert capsys.readouterr().out == ""
