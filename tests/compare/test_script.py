"""A user's script: what it must do, and what is said when it does not."""

import os
from pathlib import Path

import pytest

from laconic.compare.launch import Network, WorkerError
from laconic.compare.script import Script, launch_script
from laconic.compare.settings import LabError

# torch's launcher leaves the log files of a command to the garbage collector
pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def test_values_are_checked_before_anything_starts(script):
    with pytest.raises(
        LabError, match=r"--script .*train.py: there is no such file. Give the path of a training script"
    ):
        Script("ddp()", script)
    script.touch()
    with pytest.raises(LabError, match="--workers 0: there must be at least 1"):
        Script("ddp()", script, workers=0)
    with pytest.raises(LabError, match="--steps 0: there must be at least 1"):
        Script("ddp()", script, steps=0)
    with pytest.raises(LabError, match="--until-loss -1: it must be a number above 0"):
        Script("ddp()", script, until_loss=-1)


def test_a_script_that_fails_is_told_with_its_last_words(script, tmp_path):
    script.write_text(
        "import os\nif os.environ['RANK'] == '1': raise ValueError('no data here.')\nimport time\ntime.sleep(60)"
    )
    with pytest.raises(
        WorkerError,
        match=r"worker 1 of 2 of .*train.py failed, with plan ddp\(\): ValueError: no data here\. The other",
    ):
        launch_script(Script("ddp()", script, workers=2), tmp_path, Network())


def test_a_script_that_is_killed(script, tmp_path):
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(WorkerError, match=r"failed, with plan .*: killed by SIGKILL"):
        launch_script(Script("ddp()", script, workers=1), tmp_path, Network())


def test_a_script_that_tells_nothing(script, tmp_path):
    script.write_text("print('trained')")
    before = dict(os.environ)
    with pytest.raises(LabError, match=r"it ended without a report from every worker. .* session.report\(loss=...\)"):
        launch_script(Script("ddp()", script, workers=2), tmp_path, Network())
    assert {k: v for k, v in os.environ.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"} == {
        k: v for k, v in before.items() if k != "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    }


def test_a_script_that_chooses_its_own_plan(script, tmp_path):
    script.write_text(
        "import torch, laconic\n"
        "model = torch.nn.Linear(2, 2)\n"
        "session = laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "session.report(loss=1.0)\n"
    )
    with pytest.raises(
        LabError, match=r"it was to run power_sgd\(rank=2\) and ran ddp\(\). Let it attach laconic.plan_from_env"
    ):
        launch_script(Script("power_sgd(rank=2)", script, workers=1), tmp_path, Network())
