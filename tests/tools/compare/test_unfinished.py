"""The finished runs of a comparison that was stopped."""

from dataclasses import replace
from pathlib import Path

import pytest

from laconic.tools.compare.inputs import changed, fingerprints, given_files, imported_files
from laconic.tools.compare.records import Outcome, Point
from laconic.tools.compare.settings import Script, Settings
from laconic.tools.compare.unfinished import Finished, Unfinished, digest

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


def outcomes(unfinished: Unfinished) -> list[Outcome]:
    return [each.outcome for each in unfinished.load()[0]]


def test_outcomes_are_loaded_until_they_are_removed():
    unfinished = Unfinished(RUNS, "10mbit")
    assert outcomes(unfinished) == []
    unfinished.save([Finished(replace(DONE, loss_final=1.0), {})])
    assert outcomes(Unfinished(RUNS, "10mbit")) == [replace(DONE, loss_final=1.0)]
    unfinished.save([Finished(DONE, {})])
    assert str(outcomes(unfinished)[0].loss_final) == "nan"
    unfinished.remove()
    unfinished.remove()
    assert outcomes(unfinished) == []


def test_a_damaged_file_is_treated_as_empty(cache):
    unfinished = Unfinished(RUNS, None)
    unfinished.save([Finished(DONE, {})])
    [path] = cache.rglob("*.json")
    for text in ("", "[{}]", '[{"outcome": {"plan": 3, "curve": []}, "files": {}}]', "nonsense"):
        path.write_text(text)
        assert unfinished.load() == ([], None)


def test_a_cache_that_cannot_be_written_is_not_an_error(cache, monkeypatch):
    (cache / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    unfinished = Unfinished(RUNS, None)
    unfinished.save([Finished(DONE, {})])
    assert outcomes(unfinished) == []


def test_an_outcome_is_not_used_again_after_one_of_its_files_has_changed(tmp_path):
    module = tmp_path / "model.py"
    module.write_text("width = 1")
    unfinished = Unfinished(RUNS, None)
    first, second = Finished(DONE, {}), Finished(DONE, fingerprints([module]))
    unfinished.save([first, second])
    assert len(unfinished.load()[0]) == 2
    module.write_text("width = 2")
    found, changed = unfinished.load()
    assert len(found) == 1 and changed == str(module)


def test_the_files_of_a_run(tmp_path):
    script, text, folder = tmp_path / "train.py", tmp_path / "text", tmp_path / "images"
    folder.mkdir()
    for path in (script, text, folder / "1.png"):
        path.write_text("one")
    own = Script("ddp()", script, ("--data", str(text), f"--images={folder}", "--name=none", "3"))
    files = given_files(own)
    assert set(files) == {str(script), str(text), str(folder)}
    for path in (script, text, folder / "1.png"):
        assert changed(files) is None
        path.write_text("another")
        assert changed(files) == str(folder if path.suffix == ".png" else path)
        files = given_files(own)
    text.unlink()
    assert changed(files) == str(text)
    assert given_files(Settings(plan="ddp()")) == {}
    assert list(given_files(Settings(plan="ddp()", data=folder))) == [str(folder)]


def test_imported_files_are_those_that_no_installer_wrote():
    files = imported_files()
    assert str(Path(__file__).absolute()) in files
    assert not any("site-packages" in path or path.endswith("/json/__init__.py") for path in files)


def test_the_digest_covers_all_settings(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    own = [Script("ddp()", script)]
    names = {
        digest(own, None),
        digest([replace(own[0], arguments=("3",))], None),
        digest(RUNS, None),
        digest(RUNS, "10mbit"),
        digest(RUNS[:1], None),
        digest([replace(run, seed=1) for run in RUNS], None),
        digest([replace(run, data=tmp_path) for run in RUNS], None),
        digest([replace(run, until_loss=2.0) for run in RUNS], None),
    }
    assert len(names) == 8
