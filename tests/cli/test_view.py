"""The display: a limited number of plain lines, or a table."""

import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

import laconic
from laconic.cli.output import check_writable
from laconic.cli.view import LiveView, View, closing_table, make_view, plain_line, sparkline
from laconic.tools.compare.judging import as_json
from laconic.tools.compare.runs import Goal, Outcome, Point, Report, TrainingRun
from laconic.tools.errors import UsageError
from laconic.tools.units import human_bytes, ratio

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
        "import time; from laconic.cli.view import View; from tests.cli.test_view import DDP\n"
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


DDP = Outcome(
    plan=laconic.ddp(),
    model="gpt",
    parameters=819_200,
    workers=4,
    steps=192,
    seconds=34.9,
    communication_seconds=5.5,
    tokens_per_s=11_260.8,
    wire_bytes=943_718_400,
    loss_start=4.931,
    loss_final=1.891,
)
LOCAL = replace(DDP, plan=laconic.post_local_sgd(period=16), wire_bytes=58_982_400)

SLOW = laconic.diloco()


def shown(outcomes: list[Outcome], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(closing_table(outcomes))
    return console.export_text()


def test_the_table_fits_eighty_columns():
    text = shown([DDP, LOCAL], width=80)
    assert "gpt, 819,200 parameters, 4 workers, 192 steps" in text
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if "->" in line}
    assert rows["ddp()"] == ["4.931", "->", "1.891", "-", "944", "MB", "1.0x", "34.9"]
    assert rows["post_local_sgd(period=16)"] == ["4.931", "->", "1.891", "-", "59", "MB", "16.0x", "34.9"]


def rows_of(outcomes: list[Outcome]) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[5:] for line in shown(outcomes, width=120).splitlines() if "->" in line}


def test_ratios_are_to_ddp_wherever_it_is_in_the_list():
    assert rows_of([LOCAL, DDP]) == rows_of([DDP, LOCAL])
    assert rows_of([replace(LOCAL, plan=laconic.frugal()), replace(DDP, plan=SLOW)])[f"{SLOW}"][2] == "0.062x"
    reached = [replace(each, until_loss=2.0, ended="loss") for each in (replace(LOCAL, seconds=3.49), DDP)]
    assert rows_of(reached)["ddp()"][-2:] == ["1.0x", "1.00"]
    assert rows_of(reached)["post_local_sgd(period=16)"][-2:] == ["10.0x", "10.00"]


def test_kept_efficiency_and_plans_that_are_no_better_than_alone():
    alone = replace(DDP, plan=laconic.alone(), wire_bytes=80, loss_final=2.091)
    bad = replace(LOCAL, plan=SLOW, loss_final=2.1)
    rows = shown([DDP, alone, replace(LOCAL, loss_final=1.941), bad], 100)
    cells = {line.split()[0]: line.split()[4] for line in rows.splitlines() if "->" in line}
    assert cells == {"ddp()": "100%", "alone()": "0%", "post_local_sgd(period=16)": "75%", f"{SLOW}": "-4%"}
    said = [line.strip() for line in rows.splitlines()]
    assert said.count("no better than alone()") == 1
    assert said[said.index("no better than alone()") - 1].startswith(f"{SLOW}")

    over = [replace(each, link="10mbit", until_loss=2.0, ended="loss") for each in (DDP, alone)]
    free = replace(DDP, until_loss=2.0, ended="loss", without_link=True, seconds=7.0)
    lost = replace(LOCAL, link="10mbit", until_loss=2.0, seconds=50.0)
    text = shown([*over, lost, free], 120)
    assert "4 workers, until validation loss 2, link 10mbit" in text
    rows_by_plan = {line.split("  ")[0].strip(): line.split()[-1] for line in text.splitlines() if "->" in line}
    assert rows_by_plan == {
        "ddp()": "0.20",
        "alone()": "0.20",
        "post_local_sgd(period=16)": "0.00",
        "ddp() without the slow link": "1.00",
    }
    assert "not in 50.0" in text


def test_fewer_counts_what_is_sent_between_groups():
    nested = replace(DDP, plan=SLOW, level_bytes={"groups of 2": 943_718_400, "world": 94_371_840})
    rows = rows_of([DDP, nested])
    assert rows[f"{SLOW}"] == ["944", "MB", "94.4", "MB", "10.0x", "34.9"]
    assert rows["ddp()"] == ["944", "MB", "944", "MB", "1.0x", "34.9"]
    assert "between" in shown([DDP, nested], width=120) and "between" not in shown([DDP], width=120)


def test_a_long_plan_is_folded_and_not_cut():
    plan = laconic.Plan(
        laconic.Nested({2: 1, 4: 16, 8: 64, 16: 256, 32: 1024}), laconic.ErrorFeedback(laconic.TopK(0.01))
    )
    text = shown([replace(DDP, plan=plan)], width=80).replace("\n", "").replace(" ", "")
    assert "codec=ErrorFeedback(codec=TopK(fraction=0.01)))" in text


def test_brackets_are_not_markup():
    assert "f[bold]" in shown([replace(DDP, changed_to="f[bold]")], width=80)


def test_units():
    assert human_bytes(0) == "0 B"
    assert human_bytes(1500) == "1.5 kB"
    assert human_bytes(999_999) == "1 MB"
    assert human_bytes(2.5e15) == "2.5e+03 TB"
    assert ratio(10, 0) == "-"


def test_json_has_no_nan():
    [row] = json.loads(as_json([replace(DDP, loss_final=float("nan"))]))
    assert row["loss_final"] is None
    assert row["plan"] == "ddp()"


def test_checking_a_path_changes_nothing(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    check_writable(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--json .*: no file can be written in .*file"):
        check_writable(tmp_path / "file" / "out.json")
