"""The closing table and the JSON file."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

import laconic
from laconic.cli.output import check_writable
from laconic.cli.view import closing_table
from laconic.tools.compare.judging import as_json
from laconic.tools.compare.runs import Outcome
from laconic.tools.errors import UsageError
from laconic.tools.units import human_bytes, ratio

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
