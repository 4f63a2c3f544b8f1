"""Values are checked before any worker starts, and the errors tell what to do."""

from dataclasses import replace

import pytest

import laconic
from laconic.tools.compare.settings import Script, Settings
from laconic.tools.errors import UsageError
from laconic.tools.lab.script import parse
from laconic.tools.launch.workers import Place, check_workers, found_place


@pytest.mark.parametrize("name", ["workers", "steps", "layers", "width", "heads", "context", "batch"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_start_at_one(name, value):
    with pytest.raises(UsageError, match=rf"--{name} {value}: there must be at least 1. Use --{name} 1 or more."):
        Settings(plan="ddp()", **{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_the_learning_rate_is_a_positive_number(value):
    with pytest.raises(UsageError, match=r"--lr .*: it must be a number above 0"):
        Settings(plan="ddp()", lr=value)


def test_bucket_size_seed_and_model():
    with pytest.raises(UsageError, match=r"--bucket-mb 0: it must be a number above 0"):
        Settings(plan="ddp()", bucket_mb=0)
    with pytest.raises(UsageError, match=r"--seed -1: a seed is between 0 and"):
        Settings(plan="ddp()", seed=-1)
    with pytest.raises(UsageError, match=r"--model bert: the lab has gpt and resnet"):
        Settings(plan="ddp()", model="bert")


def test_the_guard_is_one_of_three():
    with pytest.raises(UsageError, match=r"--guard on: it must be one of off, warn, act. Use --guard warn."):
        Settings(plan="ddp()", guard="on")  # type: ignore[arg-type]


def test_heads_must_divide_the_width_evenly():
    with pytest.raises(UsageError, match=r"--width 12 --heads 5: .* Heads that fit 12: 1, 2, 3, 6\."):
        Settings(plan="ddp()", width=12, heads=5)
    with pytest.raises(UsageError, match=r"Use an even --width"):
        Settings(plan="ddp()", width=7, heads=7)
    Settings(plan="ddp()", model="resnet", width=7, heads=7)  # a ResNet has no heads to fit


def test_the_resnet_takes_no_text(tmp_path):
    with pytest.raises(UsageError, match=r"--model resnet --data .*: the ResNet trains on scikit-learn's digits"):
        Settings(plan="ddp()", model="resnet", data=tmp_path)


def test_an_unknown_plan_is_refused_before_any_worker_starts():
    with pytest.raises(laconic.PlanError, match="gossip"):
        Settings(plan="gossip()")


def test_too_many_workers():
    check_workers(workers=64, cores=16)
    check_workers(workers=16, cores=1)
    with pytest.raises(UsageError, match=r"--workers 17: this machine has 1 usable core, and more than 16"):
        check_workers(workers=17, cores=1)
    with pytest.raises(UsageError, match=r"Use --workers 32 or fewer, or add --oversubscribe to start 33"):
        check_workers(workers=33, cores=8)


def test_a_place_needs_all_of_its_variables():
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert found_place(whole) == Place(worker=1, workers=2)
    for name in whole:
        assert found_place({k: v for k, v in whole.items() if k != name}) is None


def test_a_script_is_checked_too(tmp_path):
    script = tmp_path / "train.py"
    with pytest.raises(UsageError, match=r"--script .*train.py: there is no such file. Give the path of a training"):
        Script("ddp()", script)
    script.touch()
    with pytest.raises(UsageError, match="--workers 0: there must be at least 1"):
        Script("ddp()", script, workers=0)
    with pytest.raises(UsageError, match="--steps 0: there must be at least 1"):
        Script("ddp()", script, steps=0)
    with pytest.raises(UsageError, match="--until-loss -1: it must be a number above 0"):
        Script("ddp()", script, until_loss=-1)


def test_the_lab_script_gets_all_settings_as_arguments(tmp_path):
    settings = Settings("ddp()", 2, 7, "gpt", 1, 16, 2, 8, 3, 1 / 3, 5, tmp_path / "a b", 0.1, "warn")
    parsed, losses = parse(settings.arguments(tmp_path))
    assert replace(parsed, workers=2) == settings
    assert losses is not None
    assert losses.parent == tmp_path
