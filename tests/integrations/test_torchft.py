"""torchft's quorums: replicas that are killed and come back, compared with a replay of the commits."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from tests.elastic.cluster import Cluster, Job, write_log
from tests.elastic.replay import Line, gradient, optimizer_of
from tests.workers import _context, run_workers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "elastic.md"
THREE = ("0", "1", "2")


def train(job: Job, log: Any) -> None:
    import torchft

    from laconic.integrations import torchft as ft

    store = laconic.elastic.serve(0, "127.0.0.1")
    manager = torchft.Manager(
        ft.Group(timeout=timedelta(seconds=20)),
        None,
        None,
        min_replica_size=job.least,
        use_async_quorum=False,
        timeout=timedelta(seconds=20),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{job.port}",
        hostname="127.0.0.1",
        replica_id=f"replica_{job.id}",
    )
    model = Line(1.0)
    optimizer = optimizer_of(model, job.momentum)
    session = laconic.attach(laconic.plan(job.plan), model, optimizer, timeout_s=job.timeout_s)
    session.stop_on(signal.SIGTERM)
    with ft.Run(manager, session, model, optimizer, on_commit=lambda done: log(commit=_as_list(done))) as run:
        for step in run.steps(job.total):
            with step:
                (model.flat() * gradient(step.number, step.worker, step.workers)).sum().backward()
                time.sleep(job.step_s)
                optimizer.step()
                optimizer.zero_grad()
            if session.should_stop:
                break
    log(final=model.flat().tolist(), step=session.step)
    manager.shutdown(wait=False)


def _as_list(done: laconic.elastic.Committed) -> list[Any]:
    return [done.since, done.step, list(done.workers)]


def work(job: Job) -> None:
    """Run a replica's process to its end, and write a log of what it does."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "The 'warn' method is deprecated")  # in torchft's own logger
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with (Path(job.logs) / f"{job.id}-{os.getpid()}.jsonl").open("a", buffering=1) as file:
        write_log(file, lambda log: train(job, log))
    os._exit(0)


class Replicas(Cluster):
    """The processes of replicas, and their lighthouse. A context manager: it ends all of them."""

    def __enter__(self) -> Replicas:
        from torchft.coordination import LighthouseServer

        self.lighthouse = LighthouseServer("[::]:0", 1, join_timeout_ms=500, heartbeat_timeout_ms=1000)
        self.job = replace(self.job, port=int(self.lighthouse.address().rpartition(":")[2]))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started:
            if process.is_alive():
                process.kill()
            process.join()
            process.close()
        self.lighthouse.shutdown()

    def start(self, *ids: str, **changes: Any) -> None:
        for id in ids:
            process = _context.Process(target=work, args=(replace(self.job, id=id, **changes),))
            process.start()
            self.running[id] = process
            self.started.append(process)


def job(tmp_path, **given):
    (tmp_path / "logs").mkdir()
    return Job(**{"port": 0, "logs": str(tmp_path / "logs"), "total": 10**6, "least": 1, "step_s": 0.02, **given})


@pytest.mark.parametrize(
    "plan",
    [
        "ddp()",
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in (
                "diloco(period=4)",
                "power_sgd(rank=1)",
            )
        ),
    ],
)
def test_replicas_are_killed_and_come_back(tmp_path, plan):
    with Replicas(job(tmp_path, plan=plan)) as replicas:
        replicas.start(*THREE)
        replicas.wait_for_members(*THREE)
        replicas.send("0", signal.SIGKILL)  # the first, which hosts the store of the group
        replicas.wait_for_members("0", "1")  # their ranks
        replicas.start("0")
        replicas.wait_for_members(*THREE)
        replicas.send("1", signal.SIGTERM)
        replicas.wait(60)
        assert not replicas.errors(), replicas.tail()
        finals = replicas.finals()
        assert set(finals) == set(THREE)
        assert {final["step"] for final in finals.values()} == {replicas.commits()[-1][1]}
        assert len({str(final["final"]) for final in finals.values()}) == 1
        if plan == "ddp()":
            replicas.check_finals("0")


@pytest.mark.slow
def test_diloco_continues_without_a_replica(tmp_path):
    with Replicas(job(tmp_path, plan="diloco(period=5)", total=60)) as replicas:
        replicas.start("0", "1")
        replicas.wait_for_members("0", "1")
        replicas.send("1", signal.SIGKILL)
        replicas.wait(60, "0")
        assert not replicas.errors(), replicas.tail()
        commits = replicas.commits()
        assert replicas.finals()["0"]["step"] == commits[-1][1] == 60
        assert commits[-1][2] == ["0"] and {step - since for since, step, _ in commits} == {5}


def _run_the_page(worker: int, lighthouse: str) -> tuple[int, int]:
    warnings.filterwarnings("ignore", "The 'warn' method is deprecated")
    os.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
    [block] = re.findall(r"^```python torchft\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(block, "elastic.md", "exec"), names)  # noqa: S102 - the documentation's own code
    return names["session"].step, names["manager"].current_step()


def test_the_page_runs():
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("[::]:0", 2, join_timeout_ms=500)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    assert run_workers(_run_the_page, 2, (address,), group=False) == [(20, 4)] * 2
    lighthouse.shutdown()


def test_other_managers_are_refused():
    from laconic.integrations import torchft as ft

    class Manager:
        _pg, _use_async_quorum = ft.Group(), True

    model = Line(1.0)
    optimizer = optimizer_of(model, 0.5)
    with (
        laconic.attach(laconic.ddp(), model, optimizer) as session,
        pytest.raises(ValueError, match=r"use_async_quorum=True"),
    ):
        ft.Run(Manager(), session, model, optimizer)
