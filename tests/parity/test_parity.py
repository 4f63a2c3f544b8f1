"""The twin passes torch's own tests; and the driver that says so can tell a broken twin from a right one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CAN_RUN_ON_CPU = 22

RE_EXPORTS = {
    "ddp_comm_hooks": "torch.distributed.algorithms.ddp_comm_hooks",
    "ddp_comm_hooks.powerSGD_hook": "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "ddp_comm_hooks.post_localSGD_hook": "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
    "ddp_comm_hooks.default_hooks": "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
    "ddp_comm_hooks.quantization_hooks": "torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks",
    "ddp_comm_hooks.debugging_hooks": "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks",
    "model_averaging": "torch.distributed.algorithms.model_averaging",
    "model_averaging.averagers": "torch.distributed.algorithms.model_averaging.averagers",
    "model_averaging.hierarchical_model_averager": (
        "torch.distributed.algorithms.model_averaging.hierarchical_model_averager"
    ),
    "model_averaging.utils": "torch.distributed.algorithms.model_averaging.utils",
    "optim": "torch.distributed.optim",
}

DEFECTS = {
    "model_averaging.averagers": """
class PeriodicModelAverager(PeriodicModelAverager):
    def average_parameters(self, params):
        self.step += 1
""",
    "model_averaging.utils": """
def average_parameters(params, process_group):
    import os
    os.abort()
""",
    "ddp_comm_hooks.default_hooks": """
def allreduce_hook(process_group, bucket):
    import time
    time.sleep(3600)
""",
}
"""An averager that does not average, a worker that dies, a hook that never ends."""


def drive(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), str(path or ROOT)]))
    return subprocess.run(
        [sys.executable, "-m", "tests.parity", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def stand_in(folder: Path, defects: dict[str, str]) -> Path:
    """A package `stand_in` with torch's own names in the twin's layout, and these defects."""
    for name, source in RE_EXPORTS.items():
        parts = name.split(".")
        is_package = name in {"ddp_comm_hooks", "model_averaging"}
        file = folder.joinpath("stand_in", *parts, "__init__.py" if is_package else "")
        file = file if is_package else file.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from {source} import *\n{defects.get(name, '')}")
    (folder / "stand_in" / "__init__.py").touch()
    return folder


def ours_still_alive(folder: Path) -> list[str]:
    """The processes on this machine that were started with `folder` on their path."""
    mine = f"PYTHONPATH={ROOT}{os.pathsep}{folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mine in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_twin_passes_torchs_own_tests():
    run = drive()
    assert run.returncode == 0, run.stdout + run.stderr
    counts = re.search(r"(\d+) passed, 0 failed, (\d+) skipped", run.stdout)
    assert counts is not None and int(counts[1]) >= CAN_RUN_ON_CPU, run.stdout


@pytest.mark.nightly
def test_a_right_stand_in_passes_as_the_control_does(tmp_path: Path):
    path = stand_in(tmp_path, {})
    control = drive("--torch", "-k", "param_group")
    run = drive("--twin", "stand_in", "-k", "param_group", path=path)
    assert "1 passed, 0 failed, 0 skipped" in control.stdout, control.stdout + control.stderr
    assert "1 passed, 0 failed, 0 skipped" in run.stdout, run.stdout + run.stderr
    assert (control.returncode, run.returncode) == (0, 0)


@pytest.mark.nightly
def test_each_defect_is_a_failure_and_nothing_stays_behind(tmp_path: Path):
    path = stand_in(tmp_path, DEFECTS)
    averages = drive("--twin", "stand_in", "-k", "periodic_model_averager_param_group", path=path)
    dies = drive("--twin", "stand_in", "-k", "test_average_parameters", path=path)
    hangs = drive("--twin", "stand_in", "-k", "parity_allreduce_process", "--limit", "3", path=path)
    for run in (averages, dies, hangs):
        assert run.returncode == 1, run.stdout + run.stderr
        assert "0 passed, 1 failed, 0 skipped" in run.stdout
    assert "AssertionError" in averages.stdout
    assert ours_still_alive(path) == []


def test_list_names_the_tests_and_runs_none():
    run = drive("--torch", "--list")
    assert run.returncode == 0, run.stderr
    named = run.stdout.split()
    assert len(named) >= CAN_RUN_ON_CPU
    assert {"test_ddp_hook_parity_powerSGD", "test_post_localSGD_optimizer_step_reload"} <= set(named)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--torch", "-k", "no such test"), "no upstream test has this in its name"),
        (("--twin", "no_such_package"), "No module named 'no_such_package'"),
    ],
)
def test_nothing_to_run_is_said(arguments: tuple[str, ...], said: str):
    run = drive(*arguments)
    assert run.returncode == 2
    assert said in run.stdout
