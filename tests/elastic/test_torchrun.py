"""torchrun's elastic agents: killed workers and killed agents, compared with a replay of the commits."""

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
from tests.elastic.cluster import Cluster, Job
from tests.elastic.replay import replay
from tests.workers import run_workers

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "elastic.py"


class Agents:
    """torchrun's agents on this machine, and a store that outlives them. A context manager: it ends all of them."""

    def __init__(self, logs: Path, workers_each: int = 1, nodes: str = "1:2") -> None:
        self._store = elastic.serve(0, "127.0.0.1")
        self.address = f"127.0.0.1:{self._store.port}"
        self._logs, self._each, self._nodes = logs, workers_each, nodes
        (logs / "agents").mkdir(parents=True)
        self.cluster = Cluster(Job(self._store.port, str(logs), total=10**6))  # reads the logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Agents:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self._started:
            agent.kill()
            agent.wait()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)

    def start(self, name: str, *script: str) -> None:
        """Start an agent with a script, by default `torchrun_script.py`."""
        script = script or ("-m", "tests.elastic.torchrun_script", str(self._store.port), str(self._logs), str(10**6))
        options = (
            f"--nnodes {self._nodes} --nproc-per-node {self._each} --max-restarts 3 --monitor-interval 0.1 "
            f"--rdzv-backend c10d --rdzv-id job-1 --rdzv-endpoint {self.address} --local-addr 127.0.0.1 "
            "--rdzv-conf is_host=0,last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3"
        )
        with (self._logs / "agents" / f"{name}-{len(self._started)}.txt").open("wb") as output:
            agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options.split(), *script],
                cwd=ROOT,
                env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=output,
            )
        self.running[name] = agent
        self._started.append(agent)

    def workers(self, name: str | None = None) -> list[int]:
        """List the worker processes that were ever started, by all agents or by one."""
        agent = None if name is None else self.running[name].pid
        started = [line for line in self.cluster.lines() if "started" in line]
        return [line["pid"] for line in started if agent in (None, line["agent"])]

    def alive(self, name: str | None = None) -> list[int]:
        """List the worker processes that are alive."""
        return [pid for pid in self.workers(name) if _is_ours(pid)]

    def kill(self, name: str) -> None:
        """Kill an agent and its workers, as a machine that loses its power does."""
        workers = self.alive(name)
        self.running[name].kill()
        for pid in workers:
            os.kill(pid, signal.SIGKILL)
        self.running.pop(name).wait()

    def wait_until(self, condition: Callable[[], object], timeout_s: float = 60) -> None:
        """Wait until a condition is true."""
        until = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < until, self.tail()
            time.sleep(0.05)

    def wait_until_all_train(self, workers: int, name: str, before: Sequence[int] = ()) -> None:
        """Wait for a commit of so many workers, with all workers of this agent, as processes that are not in `before`.

        Whether torchrun restarts the workers of the other agent does not matter.
        """

        def trains() -> bool:
            commits = [line for line in self.cluster.lines() if "commit" in line and len(line["commit"][2]) == workers]
            return len({line["pid"] for line in commits} & (set(self.alive(name)) - set(before))) == self._each

        self.wait_until(trains)

    def end(self) -> None:
        """Make all workers stop after the next commit. Does not wait for the agents."""
        self.cluster.job.end.touch()
        self.wait_until(lambda: not self.alive())

    def tail(self) -> str:
        outputs = [path.read_text()[-2000:] for path in sorted((self._logs / "agents").iterdir())]
        return "\n".join([self.cluster.tail(), *outputs])


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"tests.elastic.torchrun_script" in words and b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    return False


def check_against_replay(agents: Agents, finals: int) -> None:
    """Every step was committed once, and all workers end with the weights of the replay."""
    commits = agents.cluster.commits()
    expected = replay(commits)
    found = [line for line in agents.cluster.lines() if "final" in line]
    assert len(found) == finals and not agents.cluster.errors(), agents.tail()
    for final in found:
        assert final["step"] == commits[-1][1] == len(commits)
        assert torch.equal(torch.tensor(final["final"], dtype=torch.float64), expected)


@pytest.mark.slow
def test_a_killed_worker_is_restarted_and_continues_from_the_last_commit(tmp_path):
    with Agents(tmp_path / "logs", workers_each=2, nodes="1") as agents:
        agents.start("a")
        agents.wait_until_all_train(2, "a")
        before = agents.workers()
        os.kill(agents.alive("a")[0], signal.SIGKILL)  # the agent restarts both workers
        agents.wait_until_all_train(2, "a", before)
        agents.end()
        check_against_replay(agents, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("each", [1, 2])
def test_killed_workers_and_agents_come_back_to_the_last_commit(tmp_path, each):
    with Agents(tmp_path / "logs", each) as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_until_all_train(2 * each, "a")

        before = agents.workers()
        os.kill(agents.alive("a")[0], signal.SIGKILL)  # the agents restart all workers
        agents.wait_until_all_train(2 * each, "a", before)

        agents.kill("b")
        left = agents.alive("a")
        step = agents.cluster.newest()
        agents.wait_until(lambda: agents.cluster.newest() > step + 5 and len(agents.cluster.members()) == each)
        assert agents.alive("a") == left  # its workers were not restarted

        agents.start("b")
        agents.wait_until_all_train(2 * each, "b")
        agents.end()
        check_against_replay(agents, 2 * each)


@pytest.mark.slow
def test_workers_whose_agent_is_gone_leave(tmp_path):
    with Agents(tmp_path / "logs") as agents:
        agents.start("a")
        agents.start("b")
        agents.wait_until_all_train(2, "b")
        [orphan] = agents.alive("b")
        agents.running.pop("b").kill()
        agents.wait_until(lambda: orphan not in agents.alive())
        agents.wait_until(lambda: len(agents.cluster.members()) == 1)
        agents.end()
        check_against_replay(agents, 1)


def _run_example(worker: int, *arguments: str) -> str:
    sys.argv, output = [str(EXAMPLE), *arguments, "--id", str(worker)], io.StringIO()
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return output.getvalue()


@pytest.mark.slow
def test_the_example_runs_by_hand(tmp_path):
    store = elastic.serve(0, "127.0.0.1")
    for steps in ("40", "60"):  # the second run continues from what the first has saved
        arguments = (f"127.0.0.1:{store.port}", "--least", "2", "--steps", steps, "--folder", str(tmp_path / "saved"))
        first, second = run_workers(_run_example, 2, arguments, group=False)
        assert re.fullmatch(rf"step {steps}, 2 workers: loss \d\.\d+\n", first) and second == ""


@pytest.mark.nightly
def test_the_example_runs_under_torchrun(tmp_path):
    with Agents(tmp_path / "logs", workers_each=2) as agents:
        for name in ("a", "b"):
            agents.start(name, str(EXAMPLE), agents.address, "--least", "4", "--folder", str(tmp_path / "saved"))
        for name in ("a", "b"):
            assert agents.running[name].wait(120) == 0, agents.tail()
        assert len(list((tmp_path / "saved").glob("worker-*"))) == 4
