"""The twin passes torch's own tests, and the driver detects a twin with defects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parity.twin import ALGORITHMS, REPLACED_MODULES

ROOT = Path(__file__).parents[2]
CAN_RUN_ON_CPU = 22

RE_EXPORTS = {
    **{name: f"{ALGORITHMS}.{name}" for name in ("ddp_comm_hooks", "model_averaging")},
    **{name: torch_name for torch_name, name in REPLACED_MODULES.items() if name != "optim"},
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
"""An averager that does not average, a worker that crashes, a hook that does not return."""


def run_parity(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
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
    """Write a package `stand_in` with torch's own modules in the twin's layout, and these defects."""
    for name, source in RE_EXPORTS.items():
        parts = name.split(".")
        is_package = name in {"ddp_comm_hooks", "model_averaging"}
        file = folder.joinpath("stand_in", *parts, "__init__.py" if is_package else "")
        file = file if is_package else file.with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from {source} import *\n{defects.get(name, '')}")
    (folder / "stand_in" / "__init__.py").touch()
    return folder


def processes_left(folder: Path) -> list[str]:
    """Return the processes on this machine that were started with `folder` on their path."""
    variable = f"PYTHONPATH={ROOT}{os.pathsep}{folder}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if variable in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def assert_passes(least: int, *arguments: str) -> None:
    run = run_parity(*arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    counts = re.search(r"(\d+) passed, 0 failed, (\d+) skipped", run.stdout)
    assert counts is not None and int(counts[1]) >= least, run.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_twin_passes_torchs_own_tests():
    assert_passes(CAN_RUN_ON_CPU)


@pytest.mark.nightly
def test_a_stand_in_without_defects_passes_as_the_control_does(tmp_path: Path):
    path = stand_in(tmp_path, {})
    control = run_parity("--torch", "-k", "param_group")
    run = run_parity("--twin", "stand_in", "-k", "param_group", path=path)
    assert "1 passed, 0 failed, 0 skipped" in control.stdout, control.stdout + control.stderr
    assert "1 passed, 0 failed, 0 skipped" in run.stdout, run.stdout + run.stderr
    assert (control.returncode, run.returncode) == (0, 0)


@pytest.mark.nightly
def test_each_defect_is_a_failure_and_no_process_is_left(tmp_path: Path):
    path = stand_in(tmp_path, DEFECTS)
    wrong = run_parity("--twin", "stand_in", "-k", "periodic_model_averager_param_group", path=path)
    crash = run_parity("--twin", "stand_in", "-k", "test_average_parameters", path=path)
    hang = run_parity("--twin", "stand_in", "-k", "parity_allreduce_process", "--limit", "3", path=path)
    for run in (wrong, crash, hang):
        assert run.returncode == 1, run.stdout + run.stderr
        assert "0 passed, 1 failed, 0 skipped" in run.stdout
    assert "AssertionError" in wrong.stdout
    assert processes_left(path) == []


@pytest.mark.slow
def test_list_prints_the_names_and_runs_no_test():
    run = run_parity("--torch", "--list")
    assert run.returncode == 0, run.stderr
    names = run.stdout.split()
    assert len(names) >= CAN_RUN_ON_CPU
    assert {"test_ddp_hook_parity_powerSGD", "test_post_localSGD_optimizer_step_reload"} <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--torch", "-k", "no such test"), "no upstream test has this in its name"),
        (("--twin", "no_such_package"), "No module named 'no_such_package'"),
    ],
)
def test_nothing_to_run_exits_with_2(arguments: tuple[str, ...], message: str):
    run = run_parity(*arguments)
    assert run.returncode == 2
    assert message in run.stdout
