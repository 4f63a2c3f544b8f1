"""`make bench`: it says what got slower, what is missing and what is new, and knows every benchmark."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("bench")


def test_each_ratio_is_judged_by_the_band_of_its_benchmark(bench):
    recorded = {"a: same": 1.0, "a: worse": 1.0, "b: worse": 1.0, "a: better": 1.0, "a: gone": 2.0}
    now = {"a: same": 1.2, "a: worse": 1.3, "b: worse": 1.3, "a: better": 0.7, "a: added": 3.0}
    rows = bench.compare(recorded, now, {"a": 0.25, "b": 0.5})
    assert {row.name: row.change for row in rows} == {
        "a: same": "as recorded",
        "a: worse": "slower",
        "b: worse": "as recorded",
        "a: better": "faster",
        "a: gone": "missing",
        "a: added": "new",
    }


@pytest.mark.parametrize(
    ("now", "status", "said"),
    [
        ({"silence: x": 1.0}, False, "nothing got slower"),
        ({"silence: x": 2.0}, True, "1 slower or missing: silence: x"),
        ({"silence: y": 1.0}, True, "1 slower or missing: silence: x"),
    ],
)
def test_the_command_fails_if_something_got_slower_or_is_missing(
    bench, monkeypatch, tmp_path, capsys, now, status, said
):
    recorded = tmp_path / "recorded.json"
    recorded.write_text(json.dumps({"ratios": {"silence: x": 1.0, "scale: not asked for": 1.0}}))
    monkeypatch.setattr(bench, "RECORDED", recorded)
    monkeypatch.setattr(bench, "measured", lambda benchmark: now)
    monkeypatch.setattr(sys, "argv", ["bench.py", "--only", "silence"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code is status
    assert said in capsys.readouterr().out


def test_a_benchmark_that_fails_or_takes_too_long_is_told_so(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "HERE", tmp_path)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "broken.py").write_text("raise SystemExit('no such thing')")
    (tmp_path / "good.py").write_text("import sys\nopen(sys.argv[-1], 'w').write('{\"x\": 1.5}')")
    assert bench.measured(bench.Benchmark("slow", (), 0.5)) == "it took longer than 0.5 s"
    assert "no such thing" in bench.measured(bench.Benchmark("broken", (), 30))
    assert bench.measured(bench.Benchmark("good", (), 30)) == {"good: x": 1.5}


def test_ratios_are_read_from_the_rows_that_benchmarks_write(bench):
    read = {each.name: each.read for each in bench.QUICK}
    hooks = {"plain all-reduce": 9.0, "torch r=1 one bucket": 8.0, "torch r=1 one bucket, batching": 4.0}
    hooks |= {"torch r=16 one bucket": 1.0, "laconic r=1 two": 2.0}
    rows = [{"model": "M", "hook": hook, "ms": ms} for hook, ms in hooks.items()]
    assert read["powersgd"](json.dumps(rows)) == {"M, laconic r=1 two": 0.5}
    kinds = {"averaging": "contestant", "codecs": "codec"}
    for name, kind in kinds.items():
        rows = [{kind: who, "model": "M", "workers": 2, "ratio": 0.5} for who in ("torch's", "laconic's")]
        assert list(read[name](json.dumps(rows)).values()) == [0.5]
    lines = [{"plan": plan, "loss": loss} for plan, loss in {"ddp()": 2.0, "alone()": 4.0, "diloco()": 3.0}.items()]
    assert read["frontier"]("\n".join(map(json.dumps, lines))) == {"loss of diloco()": 1.5}
    ends = {
        "alone": ("base", 8.0, "loss"),
        "a": ("ours", 6.0, "loss"),
        "b": ("peer", 12.0, "loss"),
        "c": ("peer", 1.0, ""),
    }
    runs = [
        {"goal": {"name": name}, "kind": kind, "points": [{"seconds": seconds, "ended": ended}]}
        for name, (kind, seconds, ended) in ends.items()
    ]
    found = read["peers"](json.dumps(runs))
    assert found == {"beside the best of kind 'alone'": 0.75, "beside the best of kind 'peer'": 0.5}


def test_every_benchmark_has_a_quick_part_or_a_reason(bench):
    programs = {path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()} - {"bench"}
    named = [*(each.name for each in bench.QUICK), *bench.SKIPPED]
    assert len(set(named)) == len(named)
    assert programs - set(named) == set(), "add it to benchmarks/quick.py"
    assert sum(each.limit_s for each in bench.QUICK) <= 20 * 60, "limits, of which a usual run takes half"


def test_the_page_shows_what_is_recorded(bench):
    recorded = json.loads(bench.RECORDED.read_text())
    block = bench.PAGE.read_text().partition(bench.BEGIN)[2].partition(bench.END)[0]
    names = {each.name for each in bench.QUICK}
    assert recorded["ratios"] and recorded["machine"] in block and recorded["date"] in block
    for name, ratio in recorded["ratios"].items():
        assert name.partition(":")[0] in names
        assert f"| {name} | {ratio:.2f} |" in block
