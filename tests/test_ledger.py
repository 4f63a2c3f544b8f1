"""The ledger: totals, entries and JSON lines."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.ledger import Ledger, Totals, wire_bytes
from laconic.plans.schedules import Payload


@pytest.mark.parametrize(
    ("op", "payload", "workers", "sent"),
    [
        ("all_reduce", 1000, 1, 0),
        ("all_reduce", 1000, 2, 1000),
        ("all_reduce", 1000, 4, 1500),
        ("all_reduce", 1000, 8, 1750),
        ("all_gather", 1000, 1, 0),
        ("all_gather", 1000, 2, 1000),
        ("all_gather", 1000, 8, 7000),
        ("broadcast", 1000, 1, 0),
        ("broadcast", 1000, 2, 1000),
        ("broadcast", 1000, 5, 3000),
        ("broadcast", 1000, 8, 3000),
    ],
)
def test_wire_bytes(op: str, payload: int, workers: int, sent: int) -> None:
    assert wire_bytes(op, payload, workers) == sent


@given(st.integers(1, 100))
def test_a_broadcast_reaches_every_other_worker_once(workers: int) -> None:
    assert sum(wire_bytes("broadcast", 1, workers, distance) for distance in range(workers)) == workers - 1


def filled() -> Ledger:
    ledger = Ledger()
    ledger.step = 3
    ledger.record("all_reduce", 400, workers=4, phase="gradient", seconds=0.5)
    ledger.record("all_reduce", 200, workers=4, phase=Payload.GRADIENT, round_=2, seconds=0.25)
    ledger.step = 4
    ledger.record("all_gather", 10, workers=4, phase="weights", level="site", seconds=1.0)
    return ledger


def test_totals() -> None:
    ledger = filled()
    assert (ledger.payload_bytes, ledger.wire_bytes, ledger.collectives, ledger.seconds) == (610, 930, 3, 1.75)
    assert ledger.totals(by="phase") == {"gradient": Totals(2, 600, 900, 0.75), "weights": Totals(1, 10, 30, 1.0)}
    assert {type(phase) for phase in ledger.totals(by="phase")} == {str}
    assert ledger.totals(by="op") == {"all_reduce": Totals(2, 600, 900, 0.75), "all_gather": Totals(1, 10, 30, 1.0)}
    assert ledger.totals(by="level") == {"world": Totals(2, 600, 900, 0.75), "site": Totals(1, 10, 30, 1.0)}


def test_an_empty_ledger() -> None:
    ledger = Ledger()
    assert (ledger.payload_bytes, ledger.wire_bytes, ledger.collectives, ledger.seconds) == (0, 0, 0, 0)
    assert ledger.totals(by="op") == {}
    assert list(ledger.jsonl()) == []


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 64), st.sampled_from(["gradient", "weights"]))))
def test_totals_are_the_sums_of_entries(records: list[tuple[int, int, str]]) -> None:
    ledger = Ledger()
    for payload, workers, phase in records:
        ledger.record("all_reduce", payload, workers, phase=phase)
    assert ledger.payload_bytes == sum(payload for payload, _, _ in records)
    assert ledger.wire_bytes == sum(entry.wire_bytes for entry in ledger.entries)
    assert sum(total.collectives for total in ledger.totals(by="phase").values()) == len(records)


def test_json_lines_equal_the_entries(tmp_path: Path) -> None:
    ledger = filled()
    ledger.write(tmp_path / "ledger.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert lines == [json.loads(line) for line in ledger.jsonl()]
    assert lines[1] == {
        "step": 3,
        "round": 2,
        "op": "all_reduce",
        "level": "world",
        "phase": "gradient",
        "payload_bytes": 200,
        "wire_bytes": 300,
        "seconds": 0.25,
        "workers": 4,
    }


def test_the_last_entries_are_kept_and_all_are_counted() -> None:
    ledger = Ledger(keep=2)
    for payload in range(5):
        ledger.record("all_reduce", payload, workers=2, phase="gradient")
    assert [entry.payload_bytes for entry in ledger.entries] == [3, 4]
    assert (ledger.payload_bytes, ledger.collectives) == (10, 5)


def test_with_a_path_every_entry_is_written_immediately(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, keep=1)
    for payload in range(3):
        ledger.record("all_reduce", payload, workers=2, phase="gradient")
        assert [json.loads(line)["payload_bytes"] for line in path.read_text().splitlines()] == [*range(payload + 1)]
    ledger.close()
    ledger.close()
    ledger.record("all_reduce", 3, workers=2, phase="gradient")
    assert len(path.read_text().splitlines()) == 3
    assert ledger.payload_bytes == 6


def test_a_resumed_run_appends_to_the_same_file(tmp_path: Path) -> None:
    for _ in range(2):
        ledger = Ledger(tmp_path / "ledger.jsonl")
        ledger.record("all_reduce", 1, workers=2, phase="gradient")
        ledger.close()
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 2


def test_concurrent_threads_record_every_entry() -> None:
    ledger = Ledger()

    def work() -> None:
        for _ in range(500):
            ledger.record("all_reduce", 1, workers=2, phase="gradient")
            ledger.totals(by="phase")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ledger.payload_bytes, ledger.collectives, len(ledger.entries)) == (2000, 2000, 2000)


def test_an_unknown_column_is_refused() -> None:
    column: Any = "worker"
    with pytest.raises(ValueError, match=r"worker.*op.*level.*phase"):
        filled().totals(by=column)


def test_keep_must_not_be_negative() -> None:
    with pytest.raises(ValueError, match=r"Ledger\(keep=-1\)"):
        Ledger(keep=-1)


def test_notes_come_after_the_entries_of_their_step_and_count_for_nothing(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", keep=2)
    ledger.step = 1
    ledger.record("all_reduce", 4, workers=2, phase="gradient")
    ledger.note("health", 1, {"residual": 0.5})
    ledger.step = 2
    ledger.record("all_reduce", 4, workers=2, phase="gradient")
    assert [json.loads(line).get("note") for line in ledger.jsonl()] == [None, "health", None]
    assert (tmp_path / "ledger.jsonl").read_text().splitlines() == list(ledger.jsonl())
    assert json.loads(list(ledger.jsonl())[1]) == {"step": 1, "note": "health", "residual": 0.5}
    assert (ledger.collectives, ledger.payload_bytes) == (2, 8)
    ledger.close()
