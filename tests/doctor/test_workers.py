"""What workers find out together: over a real store and real connections, and about measurements that we make up."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from laconic.doctor import meeting
from laconic.doctor.diagnosis import Asked, among_workers
from laconic.doctor.finding import Finding
from laconic.doctor.measuring import Link, check_clocks, check_links, measure_clocks, measure_links, sampled, tournament
from laconic.doctor.visit import Visit
from tests.workers import free_port, run_workers

ATTACHED = """
import os
with open(f"{os.environ['LACONIC_MARKS']}/attached-{os.environ['RANK']}.json", "w") as file:
    file.write('{"plan": "ddp()", "workers": 2}')
"""
ODD = """
import os, torch, torch.distributed as dist, laconic
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4 + int(os.environ["RANK"]))
laconic.attach(laconic.plan_from_env(), model, torch.optim.SGD(model.parameters(), lr=0.1))
raise SystemExit("it went on")
"""


@pytest.mark.parametrize("workers", [2, 3, 4, 7, 8, 20])
def test_everybody_meets_everybody_once(workers):
    rounds = tournament(workers)
    pairs = [pair for round_ in rounds for pair in round_]
    assert sorted(pairs) == [(a, b) for a in range(workers) for b in range(a + 1, workers)]
    assert all(len({w for pair in round_ for w in pair}) == 2 * len(round_) for round_ in rounds)
    assert len(sampled(workers)) <= 7


def test_clocks():
    assert check_clocks([0.0, 0.05, -0.09]).verdict == "ok"
    found = check_clocks([0.0, 0.05, -2.5, 0.3, None])
    assert found.verdict == "warning"
    assert found.found == "workers 2, 3 off worker 0's clock, worker 2 by -2.5 s (1 not measured: there was no time)"


def test_one_slow_pair():
    links = [Link(a, b, 0.001, 1e9) for a, b in ((0, 1), (0, 2), (1, 2))]
    assert check_links(links).verdict == "ok"
    assert check_links([]).verdict == "ok"
    slow = [*links, Link(0, 3, 0.2, 1e7), Link(1, 3, 0.2, 1e7)]
    found = check_links(slow)
    assert found.verdict == "warning"
    assert "2 of them more than 4 times slower, most often with worker 3" in found.found
    assert "slowest 0-3 10 Mbit/s, 200.0 ms" in found.found


def _measure(worker: int) -> tuple[list[float | None], list[Link]]:
    return measure_clocks(worker, 3), measure_links(worker, 3, budget_s=0.3)


def test_measured_between_real_workers():
    results = run_workers(_measure, 3)
    offsets = results[0][0]
    assert len(offsets) == 3
    assert all(offset is not None and abs(offset) < 0.1 for offset in offsets)
    links = [link for _, found in results for link in found]
    assert sorted((link.first, link.second) for link in links) == [(0, 1), (0, 2), (1, 2)]
    assert all(link.bits_per_s > 1e6 and 0 < link.round_trip_s < 5 for link in links)


def _visit(worker: int, workers: int, port: int, asked: Asked) -> tuple[list[Finding], bool]:
    os.environ |= {"RANK": str(worker), "WORLD_SIZE": str(workers), "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return among_workers(asked)


@pytest.mark.parametrize(
    ("program", "verdict", "words"),
    [
        (ATTACHED, "ok", "all 2 workers attached ddp(), and agree about plan, parameters and versions"),
        (ODD, "problem", "DisagreementError: the workers disagree about what is attached: "),
    ],
    ids=["alike", "another model on worker 1"],
)
def test_two_workers_and_a_script(tmp_path, program, verdict, words):
    script = tmp_path / "train.py"
    script.write_text(program)
    asked = Asked(data=Path(__file__), visit=Visit(script, workers=2, limit_s=60), timeout_s=30, links_s=0.3)
    (findings, speaks), (_, speaks_too) = run_workers(_visit, 2, (2, free_port(), asked), group=False, timeout_s=100)
    assert (speaks, speaks_too) == (True, False)
    by_name = {each.name: each for each in findings}
    assert by_name["workers"].found == "all 2 came, on 1 host"
    for name in ("versions", "same versions", "same data", "connections", "clocks", "links", "meeting point"):
        assert by_name[name].verdict == "ok", by_name[name]
    assert by_name["encryption"].verdict == "warning"
    assert by_name["script"].verdict == verdict
    assert words in by_name["script"].found


def test_a_worker_that_does_not_come():
    asked = Asked(timeout_s=1)
    [(findings, speaks)] = run_workers(_visit, 1, (2, free_port(), asked), group=False)
    assert speaks
    assert findings[0].verdict == "problem"
    assert findings[0].found == "worker 1 did not come"
    assert "connections" not in {each.name for each in findings}


def test_nobody_at_the_meeting_point(monkeypatch):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with pytest.raises(meeting.MeetingError):
        meeting.meet(environ, timeout_s=0.5)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    findings, speaks = among_workers(Asked(timeout_s=0.5))
    assert speaks
    assert findings[-1].verdict == "problem"
    assert "worker 1 could not meet the others at 127.0.0.1:" in findings[-1].found
