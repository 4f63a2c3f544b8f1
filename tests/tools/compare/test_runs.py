"""Values are checked before any worker starts, and the errors tell what to do."""

from dataclasses import replace

import pytest

import laconic
from laconic.tools.compare.runs import Goal, Script, TrainingRun, describe
from laconic.tools.errors import UsageError
from laconic.tools.lab.script import parse
from laconic.tools.lab.tasks import Lab
from laconic.tools.launch.links import link
from laconic.tools.launch.workers import Place, WorkerNetwork, check_workers, found_place


@pytest.mark.parametrize("name", ["layers", "width", "context", "batch"])
@pytest.mark.parametrize("value", [0, -3])
def test_counts_start_at_one(name, value):
    with pytest.raises(UsageError, match=rf"--{name} {value}: there must be at least 1. Use --{name} 1 or more."):
        Lab(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_the_learning_rate_is_a_positive_number(value):
    with pytest.raises(UsageError, match=r"--lr .*: it must be a number above 0"):
        Lab(lr=value)


def test_seed_and_model():
    with pytest.raises(UsageError, match=r"--seed -1: a seed is between 0 and"):
        Lab(seed=-1)
    with pytest.raises(UsageError, match=r"--model bert: the lab has gpt and resnet"):
        Lab(model="bert")


def test_the_guard_is_one_of_three():
    with pytest.raises(UsageError, match=r"--guard on: it must be one of off, warn, act. Use --guard warn."):
        Lab(guard="on")  # type: ignore[arg-type]


def test_a_head_has_an_even_width():
    assert [Lab(width=width).heads for width in (16, 64, 128)] == [1, 2, 4]
    with pytest.raises(UsageError, match=r"--width 100: a GPT of this width has 3 heads, .* Use a multiple of 64"):
        Lab(width=100)
    Lab(model="resnet", width=7)  # a ResNet has no heads


def test_the_resnet_takes_no_text(tmp_path):
    with pytest.raises(UsageError, match=r"--model resnet --data .*: the ResNet trains on scikit-learn's digits"):
        Lab(model="resnet", data=tmp_path)


def test_too_many_workers():
    check_workers(workers=64, cores=16)
    check_workers(workers=16, cores=1)
    with pytest.raises(UsageError, match=r"--workers 17: this machine has 1 usable core, and more than 16"):
        check_workers(workers=17, cores=1)
    with pytest.raises(UsageError, match=r"Use --workers 32 or fewer, or laconic simulate"):
        check_workers(workers=33, cores=8)


def test_a_place_needs_all_of_its_variables():
    whole = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert found_place(whole) == Place(worker=1, workers=2)
    for name in whole:
        assert found_place({k: v for k, v in whole.items() if k != name}) is None


def test_scripts_and_goals_are_checked_too(tmp_path):
    script = tmp_path / "train.py"
    with pytest.raises(UsageError, match=r"--script .*train.py: there is no such file. Give the path of a training"):
        Script(script)
    with pytest.raises(UsageError, match="--workers 0: there must be at least 1"):
        TrainingRun(laconic.ddp(), workers=0)
    with pytest.raises(UsageError, match="--steps 0: there must be at least 1"):
        Goal(steps=0)
    with pytest.raises(UsageError, match="--validate-every 0: there must be at least 1"):
        Goal(validate_every=0)
    with pytest.raises(UsageError, match="--until-loss -1: it must be a number above 0"):
        Goal(until_loss=-1)


def test_the_lab_script_gets_all_settings_as_arguments(tmp_path):
    lab = Lab("gpt", 1, 16, 8, 3, 1 / 3, 5, tmp_path / "a b", 0.1, "warn")
    assert parse(lab.arguments(7)) == (lab, 7)


def test_what_a_run_depends_on_is_in_its_description(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    run, own = TrainingRun(laconic.ddp()), TrainingRun(laconic.ddp(), Script(script))
    slow = WorkerNetwork(computed=link("10mbit", workers=4))
    different = {
        describe(run, WorkerNetwork()),
        describe(run, slow),
        describe(replace(run, plan=laconic.alone()), WorkerNetwork()),
        describe(replace(run, training=Lab(seed=1)), WorkerNetwork()),
        describe(replace(run, training=Lab(data=tmp_path)), WorkerNetwork()),
        describe(replace(run, goal=Goal(300, until_loss=2.0)), WorkerNetwork()),
        describe(own, WorkerNetwork()),
        describe(replace(own, training=Script(script, ("3",))), WorkerNetwork()),
    }
    assert len(different) == 8
