"""torchrun's elastic agents: killed workers and whole agents, against a replay of the committed rounds."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from laconic import elastic
from tests.elastic.chaos import Crowd, Job, replay
from tests.workers import run_workers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic.py"


class Agents:
    """torchrun's agents on this machine, and a store that outlives them. A context manager: none is left behind."""

    def __init__(self, logs: Path, workers_each: int = 1) -> None:
        self._store = elastic.serve(0, "127.0.0.1")
        self.place = f"127.0.0.1:{self._store.port}"
        self._logs, self._each = logs, workers_each
        (logs / "agents").mkdir(parents=True)
        self.crowd = Crowd(Job(self._store.port, str(logs), total=10**6))  # for its reading of logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._everyone: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._everyone:
            agent.kill()
            agent.wait()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)

    def start(self, name: str, *script: str) -> None:
        """Start an agent, with a script or else with `restarted.py`."""
        script = script or ("-m", "tests.elastic.restarted", str(self._store.port), str(self._logs), str(10**6))
        how = [
            "--nnodes",
            "1:2",
            "--nproc-per-node",
            str(self._each),
            "--max-restarts",
            "3",
            "--monitor-interval",
            "0.1",
        ]
        meet = [
            "--rdzv-backend",
            "c10d",
            "--rdzv-id",
            "job-1",
            "--rdzv-endpoint",
            self.place,
            "--local-addr",
            "127.0.0.1",
        ]
        conf = ["--rdzv-conf", "is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"]
        with (self._logs / "agents" / f"{name}-{len(self._everyone)}.txt").open("wb") as said:
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *how, *meet, *conf, *script],
                cwd=ROOT,
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=said,
            )
        self.running[name] = agent
        self._everyone.append(agent)

    def workers(self, name: str | None = None) -> list[int]:
        """List the processes of workers that were ever started, of all agents or of one that runs."""
        agent = None if name is None else self.running[name].pid
        started = [line for line in self.crowd.lines() if "started" in line]
        return [line["pid"] for line in started if agent in (None, line["agent"])]

    def alive(self, name: str | None = None) -> list[int]:
        """List the processes of workers that live."""
        return [pid for pid in self.workers(name) if _is_ours(pid)]

    def kill(self, name: str) -> None:
        """Kill an agent and its workers, as when a machine loses its power."""
        workers = self.alive(name)
        self.running[name].kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        self.running.pop(name).wait()

    def until(self, what: Callable[[], object], timeout_s: float = 60) -> None:
        """Wait for something to become true."""
        until = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < until, self.tail()
            time.sleep(0.05)

    def until_all_train(self, workers: int, name: str, before: Sequence[int] = ()) -> None:
        """Wait for a round of so many workers, all of this agent's among them as processes that were not there before.

        Whether those of the other agent were started again is torchrun's affair.
        """

        def trains() -> bool:
            told = [line for line in self.crowd.lines() if "commit" in line and len(line["commit"][2]) == workers]
            return len({line["pid"] for line in told} & (set(self.alive(name)) - set(before))) == self._each

        self.until(trains)

    def end(self) -> None:
        """Let all workers stop after the next round. Agents may wait for those that were killed: not we."""
        self.crowd.job.end.touch()
        self.until(lambda: not self.alive())

    def tail(self) -> str:
        said = [path.read_text()[-2000:] for path in sorted((self._logs / "agents").iterdir())]
        return "\n".join([self.crowd.tail(), *said])


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"tests.elastic.restarted" in words and b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    return False


def check_against_replay(agents: Agents, finals: int) -> None:
    """Every committed round was done once, and all who are there at the end hold what the replay gives."""
    rounds = agents.crowd.commits()
    expected = replay(rounds)
    found = [line for line in agents.crowd.lines() if "final" in line]
    assert len(found) == finals and not agents.crowd.errors(), agents.tail()
    for final in found:
        assert final["step"] == rounds[-1][1] == len(rounds)
        assert torch.equal(torch.tensor(final["final"], dtype=torch.float64), expected)


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_killed_workers_and_agents_come_back_to_the_last_committed_round(tmp_path, each):
    with Agents(tmp_path / "logs", each) as agents:
        agents.start("a")
        agents.start("b")
        agents.until_all_train(2 * each, "a")

        before = agents.workers()
        os.kill(agents.alive("a")[0], signal.SIGKILL)  # the agents start all workers again
        agents.until_all_train(2 * each, "a", before)

        agents.kill("b")
        left = agents.alive("a")
        step = agents.crowd.newest()
        agents.until(lambda: agents.crowd.newest() > step + 5 and len(agents.crowd.members()) == each)
        assert agents.alive("a") == left  # its workers went on as they were

        agents.start("b")
        agents.until_all_train(2 * each, "b")
        agents.end()
        check_against_replay(agents, 2 * each)


@pytest.mark.nightly
def test_workers_whose_agent_is_gone_leave(tmp_path):
    with Agents(tmp_path / "logs") as agents:
        agents.start("a")
        agents.start("b")
        agents.until_all_train(2, "b")
        [orphan] = agents.alive("b")
        agents.running.pop("b").kill()
        agents.until(lambda: orphan not in agents.alive())
        agents.until(lambda: len(agents.crowd.members()) == 1)
        agents.end()
        check_against_replay(agents, 1)


def _by_hand(worker: int, *arguments: str) -> str:
    sys.argv, told = [str(EXAMPLE), *arguments, "--id", str(worker)], io.StringIO()
    with contextlib.redirect_stdout(told):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return told.getvalue()


def test_the_example_runs_by_hand(tmp_path):
    store = elastic.serve(0, "127.0.0.1")
    place, saved = f"127.0.0.1:{store.port}", str(tmp_path / "saved")
    for steps in ("60", "90"):  # the second goes on from what the first has saved
        arguments = (place, "--least", "2", "--steps", steps, "--folder", saved)
        first, second = run_workers(_by_hand, 2, arguments, group=False)
        assert re.fullmatch(rf"step {steps}, 2 workers: loss \d\.\d+\n", first) and second == ""


@pytest.mark.nightly
def test_the_example_runs_under_torchrun(tmp_path):
    with Agents(tmp_path / "logs", workers_each=2) as agents:
        for name in ("a", "b"):
            agents.start(name, str(EXAMPLE), agents.place, "--least", "4", "--folder", str(tmp_path / "saved"))
        for name in ("a", "b"):
            assert agents.running[name].wait(120) == 0, agents.tail()
        assert len(list((tmp_path / "saved").glob("worker-*"))) == 4
