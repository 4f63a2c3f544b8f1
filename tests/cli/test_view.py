"""The display: a limited number of plain lines, or a table."""

import io
import subprocess
import sys
from dataclasses import replace

from rich.cells import cell_len
from rich.text import Text

import laconic
from laconic.cli.view import LiveView, View, make_view, plain_line, sparkline
from laconic.tools.compare.runs import Goal, Outcome, Point, Report, TrainingRun
from tests.cli.test_results import DDP

RUNS = [TrainingRun(plan, goal=Goal(200)) for plan in (laconic.ddp(), laconic.diloco())]
NOW = Report(worker=0, step=1, loss=2.0, seconds=1.0, tokens=1234, wire_bytes=5000)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_view_depends_on_stdout(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert isinstance(make_view(RUNS, plain=False), LiveView)
    assert type(make_view(RUNS, plain=True)) is View
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert type(make_view(RUNS, plain=False)) is View


def test_a_run_has_about_ten_plain_lines_with_the_last(capsys):
    view = View(RUNS)
    for step in range(1, 201):
        view.progress(0, replace(NOW, step=step, ended="steps" if step == 200 else ""))
    view.progress(1, NOW)
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 13
    numbers = "loss=2.000 validation=- kept=- tokens/s=1,234 communication=0% sent=5 kB MB/s=0.01 left=199s"
    assert lines[0] == f"ddp() step=1/200 {numbers}"
    assert lines[-2].startswith("ddp() step=200/200")
    assert lines[-1].startswith("diloco(period=16) step=1/200")


def test_early_lines_show_nothing_kept_where_the_baselines_differ_by_noise(capsys):
    def ended(plan: str, losses: list[float]) -> Outcome:
        points = tuple(Point(5 * i, float(i), loss, 0) for i, loss in enumerate(losses, 1))
        return replace(DDP, plan=laconic.plan(plan), steps=25, loss_final=losses[-1], validations=points)

    view = View(RUNS)
    view.finish(ended("ddp()", [3.0, 2.5, 2.3, 2.0, 1.8]))
    view.finish(ended("alone()", [3.01, 2.52, 2.31, 2.1, 2.0]))
    for step, loss in ((5, 3.012), (25, 1.85)):
        view.progress(1, replace(NOW, step=step, validation=loss, ended="steps"))
        view._next.clear()
    first, last = (line for line in capsys.readouterr().out.splitlines() if "step=" in line)
    assert " kept=- " in first and " kept=75% " in last


def test_a_script_need_not_report_tokens():
    assert "tokens/s=- " in plain_line(RUNS[0], replace(NOW, tokens=0))


def test_a_broken_pipe_does_not_stop_the_run():
    program = (
        "import time; from laconic.cli.view import View; from tests.cli.test_results import DDP\n"
        "view = View([])\n"
        "while not view._console.quiet: view.message('x' * 999)\n"
        "view.results([DDP]); print('end')"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.readline()
        running.stdout.close()
        assert (running.stderr.read(), running.wait(60)) == (b"", 0)


def test_the_live_table_fits_eighty_columns_and_shows_runs_that_wait(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    view = LiveView(RUNS)
    now = replace(NOW, communication_seconds=0.25, wire_bytes=1_500_000)
    with view.running():
        for step in range(1, 101):
            view.progress(0, replace(now, step=step, loss=5 - step / 50))
    text = screen.getvalue()
    for words in ("ddp()", "▇▆▅▄", "100/200", "3.000", "1,234", "25%", "1.5 MB", "1.50", "1s", "diloco(period=16)"):
        assert words in text
    assert max(map(cell_len, Text.from_ansi(text).plain.splitlines())) <= 80


def test_a_run_of_unknown_length():
    assert plain_line(TrainingRun(laconic.ddp(), goal=Goal()), NOW).endswith(
        "step=1 loss=2.000 validation=- kept=- tokens/s=1,234 communication=0% sent=5 kB MB/s=0.01 left=-"
    )
    assert plain_line(TrainingRun(laconic.ddp(), goal=Goal(seconds=9.0)), NOW).endswith("left=8s")
    assert plain_line(RUNS[0], replace(NOW, ended="loss")).endswith("left=done")


def test_what_a_guard_measures_is_shown_where_there_is_one(monkeypatch):
    assert plain_line(RUNS[0], replace(NOW, residual=0.417, agreement=0.805)).endswith("residual=0.42 agreement=0.81")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("TERM", "xterm")
    view = LiveView(RUNS)
    with view.running():
        view.progress(0, NOW)
    assert "behind" not in screen.getvalue()
    with view.running():
        view.progress(1, replace(NOW, residual=0.417, agreement=0.806))
    lines = Text.from_ansi(screen.getvalue()).plain.splitlines()
    assert [line.split()[-2:] for line in lines if "behind" in line][-1] == ["behind", "agree"]
    assert [line.split()[-2:] for line in lines if "diloco" in line][-1] == ["0.42", "0.81"]
    assert [line.split()[-2:] for line in lines if "ddp()" in line][-1] == ["-", "-"]


def test_a_sparkline_skips_nonfinite_values():
    assert sparkline([], width=8) == ""
    assert sparkline([float("nan"), float("inf")], width=8) == ""
    assert sparkline([1.0] * 100, width=8) == "▁" * 8
    assert sparkline([float("nan"), 2.0, 1.0], width=8) == "█▁"
