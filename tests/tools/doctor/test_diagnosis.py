"""Checks among real workers, over a real store and real connections."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laconic.tools.doctor.checks import Finding
from laconic.tools.doctor.diagnosis import check_as_worker
from laconic.tools.doctor.script import ScriptRun
from tests.workers import free_port, run_workers

ATTACH = """
import os, torch, torch.distributed as dist, laconic
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 4 + {other} * int(os.environ["RANK"]))
laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters(), lr=0.1))
raise SystemExit("attach returned")
"""


def _check(
    worker: int, workers: int, port: int, data: Path | None, script: ScriptRun | None, timeout_s: float
) -> tuple[list[Finding], bool]:
    os.environ |= {"RANK": str(worker), "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return check_as_worker(data, script, timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "severity", "words"),
    [
        (0, "ok", "all 2 workers attached ddp(), with the same parameters and versions"),
        (1, "problem", "DisagreementError: the workers disagree about what is attached: "),
    ],
    ids=["alike", "another model on worker 1"],
)
def test_two_workers_and_a_script(tmp_path, other, severity, words):
    script = tmp_path / "train.py"
    script.write_text(ATTACH.format(other=other))
    args = (2, free_port(), Path(__file__), ScriptRun(script, workers=2, limit_s=60), 30)
    (findings, shows), (_, also_shows) = run_workers(_check, 2, args, group=False, timeout_s=100)
    assert (shows, also_shows) == (True, False)
    by_name = {each.name: each for each in findings}
    assert by_name["workers"].found == "all 2 workers answer, on 1 host"
    assert "links" in by_name
    for name in ("versions", "same versions", "same data", "connections", "master address"):
        assert by_name[name].severity == "ok", by_name[name]
    assert by_name["script"].severity == severity
    assert words in by_name["script"].found


def test_one_worker_alone():
    [(findings, shows)] = run_workers(_check, 1, (1, free_port(), None, None, 10), group=False)
    assert shows
    assert findings[0].found == "all 1 workers answer, on 1 host"


def test_a_worker_that_does_not_answer():
    [(findings, shows)] = run_workers(_check, 1, (2, free_port(), None, None, 1), group=False)
    assert shows
    assert (findings[0].severity, findings[0].found) == ("problem", "worker 1 did not respond")
    assert "connections" not in {each.name for each in findings}


def test_no_store_at_the_master_address(monkeypatch):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    findings, shows = check_as_worker(timeout_s=0.5)
    assert shows
    assert findings[-1].severity == "problem"
    assert "worker 1 cannot reach the store at 127.0.0.1:" in findings[-1].found


def _check_restarted(worker: int, port: int) -> list[Finding]:
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(worker)
    return _check(worker, 2, port, None, None, 20)[0]


def test_workers_whose_agents_count_restarts_differently():
    """The agent of a killed worker counts its restart; one that only noticed does not."""
    findings, _ = run_workers(_check_restarted, 2, (free_port(),), group=False)
    assert findings[0].found == "all 2 workers answer, on 1 host"
