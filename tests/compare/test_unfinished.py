"""The finished runs of a comparison that was stopped."""

from dataclasses import replace
from pathlib import Path

import pytest

from laconic.compare.records import Outcome, Point
from laconic.compare.settings import Script, Settings
from laconic.compare.unfinished import Unfinished, digest

RUNS = [Settings(plan="ddp()"), Settings(plan="power_sgd(rank=4)")]
DONE = Outcome(
    plan="ddp()",
    model="gpt",
    parameters=8,
    workers=2,
    steps=3,
    seconds=1.0,
    talking_seconds=0.5,
    tokens_per_s=9.0,
    sent_bytes=1,
    wire_bytes=1,
    loss_start=2.0,
    loss_final=float("nan"),
    wire_bytes_by_worker=(1, 1),
    level_bytes={"world": 1},
    curve=(Point(1, 0.5, 2.0, 1),),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_outcomes_are_loaded_until_they_are_removed():
    unfinished = Unfinished(RUNS, "10mbit")
    assert unfinished.load() == []
    unfinished.save([replace(DONE, loss_final=1.0)])
    assert Unfinished(RUNS, "10mbit").load() == [replace(DONE, loss_final=1.0)]
    unfinished.save([DONE])
    assert str(unfinished.load()[0].loss_final) == "nan"
    unfinished.remove()
    unfinished.remove()
    assert unfinished.load() == []


def test_a_damaged_file_is_treated_as_empty(cache):
    unfinished = Unfinished(RUNS, None)
    unfinished.save([DONE])
    [path] = cache.rglob("*.json")
    for text in ("", "[{}]", '[{"plan": 3, "curve": []}]', "nonsense"):
        path.write_text(text)
        assert unfinished.load() == []


def test_a_cache_that_cannot_be_written_is_not_an_error(cache, monkeypatch):
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    unfinished = Unfinished(RUNS, None)
    unfinished.save([DONE])
    assert unfinished.load() == []


def test_the_digest_covers_everything_that_results_depend_on(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("one")
    own = [Script("ddp()", script)]
    before = digest(own, None)
    script.write_text("two")
    names = {
        before,
        digest(own, None),
        digest([replace(own[0], arguments=("3",))], None),
        digest(RUNS, None),
        digest(RUNS, "10mbit"),
        digest(RUNS[:1], None),
        digest([replace(run, seed=1) for run in RUNS], None),
        digest([replace(run, until_loss=2.0) for run in RUNS], None),
    }
    assert len(names) == 8
