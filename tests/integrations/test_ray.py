"""Ray Train on a real cluster of two nodes: plans behind `prepare_model`, a killed worker, Ray's own checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from pathlib import Path

import pytest

import laconic
from laconic import checkpoint
from tests.examples.launching import CLUSTER, ROOT, Launched, launched, same, saved

pytestmark = pytest.mark.frameworks
pytest.importorskip("ray")

KILLED_AT, SAVE_EVERY = 25, 10
"""Steps 10 and 20, one of which Ray goes on from, are between two syncs: the weights of the workers differ there."""


class KillOnce(laconic.StepObserver):
    """Kills worker 1 in one step of the first attempt, as a machine that loses its power would."""

    def before_step(self, session: laconic.Session) -> None:
        mark, group = Path(os.environ["LACONIC_TEST_MARK"]), session.group
        if group is not None and group.rank() == 1 and session.step + 1 == KILLED_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster():
    """The variables with which a driver finds a cluster of two nodes with one CPU each, on the loopback alone."""
    from ray.cluster_utils import Cluster

    variables = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # addresses are those of the loopback
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
    }
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray") as folder:
        variables["RAY_TMPDIR"] = folder
        for name, value in variables.items():
            patch.setenv(name, value)
        node = {"num_cpus": 1, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            made.add_node(**node)
            yield {**variables, "RAY_ADDRESS": made.address}
        finally:
            made.shutdown()


def finished(command: list[str], variables: dict[str, str], folder: Path) -> Launched:
    """Run a command to its end."""
    with launched([(command, variables)], folder) as [run]:
        assert run.wait(150) == 0, run.output[-6000:]
    return run


@pytest.fixture(scope="module")
def results(cluster, tmp_path_factory):
    """What each worker has found, by the number of workers and the worker."""
    folder = tmp_path_factory.mktemp("results")
    finished(["python", "-m", "tests.integrations.ray_plans", str(folder)], cluster, folder)
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("?-?.json")} | {"folder": folder}


@pytest.mark.parametrize("worker", ["2-0", "2-1", "1-0"])
def test_losses_with_ddp_are_those_without_laconic(results, worker):
    found = results[worker]
    assert found["None"]["ddp"] == found["ddp()"]["ddp"] == (worker != "1-0")  # in a world of one, a bare module
    assert found["ddp()"]["losses"] == found["None"]["losses"]


@pytest.mark.parametrize("worker", ["2-0", "2-1"])
def test_plans_send_what_they_promise(results, worker):
    from tests.integrations.ray_plans import STEPS, model_of_the_tests

    for text, phase, steps in (
        ("quantized_ddp(bits=4)", "gradient", range(1, STEPS + 1)),
        ("diloco(period=4)", "weights", (4, 8)),
    ):
        found = results[worker][text]
        planned = STEPS * laconic.sent_bytes(laconic.plan(text), model_of_the_tests())
        assert found["phases"][phase] == planned, found
        assert found["steps"] == list(steps)
        assert found["losses"][-1] < found["losses"][0]


def test_one_worker_sends_nothing(results):
    for plan in ("ddp()", "quantized_ddp(bits=4)", "diloco(period=4)"):
        assert sum(results["1-0"][plan]["phases"].values()) == 0


@pytest.mark.timeout(400)  # two runs, one after the other
def test_the_example_survives_a_killed_worker_bit_for_bit(cluster, results, tmp_path):
    """The run goes on from Ray's checkpoint, with each worker's own state, and ends as one without a fault does."""
    from tests.integrations.ray_plans import EXAMPLE_PLAN, EXAMPLE_STEPS

    storage, mark = tmp_path / "storage", tmp_path / "killed"
    killing = {"LACONIC_OBSERVERS": "tests.integrations.test_ray:KillOnce", "LACONIC_TEST_MARK": str(mark)}
    variables = {**cluster, **killing, "LACONIC_PLAN": EXAMPLE_PLAN}
    command = ["python", str(CLUSTER / "ray_train.py"), "--storage", str(storage), "--save-every", str(SAVE_EVERY)]
    run = finished([*command, "--steps", str(EXAMPLE_STEPS)], variables, tmp_path)
    assert mark.exists()
    assert run.output.count("all 2 workers answer") == 2, "the doctor has run in both attempts"
    assert re.search(r"^diloco\(period=8\): step 40, loss \d\.\d{4}, sent [\d,]+ bytes$", run.output, re.M)

    newest = max(storage.glob("laconic/checkpoint_2*"))
    own = [checkpoint.load(newest / f"worker-{worker}-of-2", worker=0, workers=1).state for worker in range(2)]
    assert same(own, saved(results["folder"], EXAMPLE_STEPS, 2))

    again = finished([*command, "--steps", str(EXAMPLE_STEPS + 4)], variables, tmp_path)  # a run of the same name
    assert "step 44, " in again.output
    assert not re.search(r"step [123]0 is saved", again.output)
