"""The launchers of examples/cluster are run as far as one machine allows: the same files, the same lines."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess

import pytest

from laconic import checkpoint
from tests.examples.launching import CLUSTER, ROOT, environment, launched, same, saved, wait_until
from tests.namespaces import hosts, needs_root
from tests.workers import free_port

PLAN = "diloco(period=8)"  # residuals, anchors and momentum, and weights that differ in most steps
STEPS = 160
ARGUMENTS = ["--steps", str(STEPS), "--save-every", "10"]
SCRIPTS = sorted([*CLUSTER.glob("*.sh"), CLUSTER / "slurm.sbatch"])


def test_scripts_are_executable_and_parse():
    for script in SCRIPTS:
        assert os.access(script, os.X_OK), script.name
        subprocess.run(["bash", "-n", script], check=True, timeout=20)


@pytest.mark.skipif(shutil.which("shellcheck", path=environment()["PATH"]) is None, reason="needs shellcheck")
def test_scripts_pass_shellcheck():
    done = subprocess.run(["shellcheck", *SCRIPTS], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_the_page_and_the_folder_list_every_file():
    listed = set(re.findall(r"^\| \[`?([\w.-]+)", (CLUSTER / "README.md").read_text(), re.M))
    assert listed == {path.name for path in CLUSTER.iterdir() if path.is_file()} - {"README.md"}


def test_the_image_has_all_that_is_copied():
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    copied = [line.split()[1:] for line in lines if line.startswith("COPY")]
    assert copied
    for *sources, target in copied:
        assert all((ROOT / source).exists() for source in sources)
        assert target.rstrip("/") in (".", *sources), "the paths of the image are those of the repository"
    [entry] = re.findall(r'^ENTRYPOINT \["(.*)"\]$', "\n".join(lines), re.M)
    directory = [line.split()[1] for line in lines if line.startswith("WORKDIR")][-1]
    assert (ROOT / directory.removeprefix("/laconic/") / entry) == CLUSTER / "torchrun.sh"


@pytest.mark.parametrize("missing", ["NODES", "NODE", "HEAD"])
def test_torchrun_names_what_is_missing(missing):
    given = {name: "1" for name in ("NODES", "NODE", "HEAD") if name != missing}
    bare = {"PATH": os.environ["PATH"], **given}
    done = subprocess.run([CLUSTER / "torchrun.sh"], env=bare, capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert f"{missing}: " in done.stderr


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The states of two workers at the end of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", str(CLUSTER / "train.py"), *ARGUMENTS]
    with launched([(command, {"LACONIC_PLAN": PLAN})], folder) as [run]:
        assert run.wait() == 0, run.output[-3000:]
    return saved(folder / "checkpoints", STEPS, 2)


@pytest.mark.nightly
def test_sigterm_stops_all_and_the_next_start_goes_on(tmp_path, whole):
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python", str(CLUSTER / "worker.sh")]
    command += ARGUMENTS
    with launched([(command, {"LACONIC_PLAN": PLAN})], tmp_path) as [run]:
        wait_until(lambda: checkpoint.checkpoints(tmp_path / "checkpoints"), [run])
        os.kill(run.workers()[0], signal.SIGTERM)
        assert run.wait() != 0
        [step] = set(re.findall(r"stopped after step (\d+): the same command", run.output))
        assert run.output.count("stopped after step") == 2
        assert re.search(r"^no problem, ", run.output, re.M), "the doctor has run"
    assert checkpoint.checkpoints(tmp_path / "checkpoints")[-1].step == int(step) < STEPS
    with launched([(command, {"LACONIC_PLAN": PLAN})], tmp_path) as [run]:
        assert run.wait() == 0, run.output[-3000:]
        assert re.search(r"^diloco\(period=8\): step 160, loss \d\.\d{4}, sent [\d,]+ bytes$", run.output, re.M)
    assert same(saved(tmp_path / "checkpoints", STEPS, 2), whole)


SRUN = """#!/usr/bin/env bash
# Runs the command once for each node, at the same time, as srun does with one task a node.
[ "$1" = --kill-on-bad-exit=1 ] && shift
for node in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
    SLURM_NODEID=$node "$@" &
done
for _ in $(seq "$SLURM_JOB_NUM_NODES"); do wait -n || exit 1; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames 127.0.0.[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n'
"""


@pytest.mark.nightly
def test_the_slurm_job_runs_with_a_stand_in_for_srun(tmp_path):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for file in ("torchrun.sh", "worker.sh", "train.py"):
        (tmp_path / file).symlink_to(CLUSTER / file)
    (tmp_path / "spool").mkdir()
    job = shutil.copy(CLUSTER / "slurm.sbatch", tmp_path / "spool" / "slurm_script")  # where slurmd runs it
    slurm = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    slurm |= {"SLURM_SUBMIT_DIR": str(tmp_path), "WORKERS": "1", "ADDRESS": "127.0.0.1"}
    slurm["PATH"] = f"{tmp_path}:{environment()['PATH']}"
    with launched([([str(job), "--steps", "40", "--save-every", "20"], slurm)], tmp_path) as [run]:
        assert run.wait() == 0, run.output[-3000:]
        assert "ok: workers: all 2 workers answer, on 1 host" in run.output
        assert re.search(r"^diloco\(period=16\): step 40, ", run.output, re.M)
    assert [(each.step, each.workers) for each in checkpoint.checkpoints(tmp_path / "checkpoints")] == [
        (20, 2),
        (40, 2),
    ]


@pytest.mark.nightly
def test_kubeflows_command_runs_with_its_variables_alone(tmp_path):
    text = (CLUSTER / "kubeflow-trainjob.yaml").read_text()
    [command] = re.findall(r"^    command: \[(.*)\]$", text, re.M)
    assert command.endswith("./worker.sh")
    words = [*command.removesuffix("./worker.sh").replace(",", " ").split(), str(CLUSTER / "worker.sh")]
    master = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    master |= {"PET_MASTER_PORT": str(free_port()), "LACONIC_PLAN": PLAN}
    pods = [([*words, "--steps", "20"], {**master, "PET_NODE_RANK": rank}) for rank in "01"]
    with launched(pods, tmp_path) as runs:
        assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output[-2000:] for run in runs)
        assert "all 2 workers answer" in runs[0].output
        assert re.search(r"^diloco\(period=8\): step 20, ", runs[0].output, re.M)


class TestOnTwoHosts:
    """`torchrun.sh` itself, with an agent in each of two network namespaces."""

    pytestmark = needs_root

    @pytest.mark.slow
    def test_a_killed_worker_comes_back_and_all_go_on_from_the_checkpoint(self, tmp_path, whole):
        folder = tmp_path / "checkpoints"
        with hosts(2) as made:
            common = {"NODES": "2", "WORKERS": "1", "HEAD": made[0][1], "LACONIC_PLAN": PLAN}
            agents = []
            for node, (host, address) in enumerate(made):
                own = {**common, "NODE": str(node), "ADDRESS": address, "GLOO_SOCKET_IFNAME": "eth0"}
                agents.append((["ip", "netns", "exec", host, str(CLUSTER / "torchrun.sh"), *ARGUMENTS], own))
            with launched(agents, tmp_path) as runs:
                wait_until(lambda: checkpoint.checkpoints(folder), runs)
                [killed] = runs[1].workers()
                os.kill(killed, signal.SIGKILL)
                assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output[-3000:] for run in runs)
        output = "".join(run.output for run in runs)
        assert f"(pid: {killed})" in output or "Signal 9" in output, output[-3000:]
        assert output.count("ok: workers: all 2 workers answer") == 2, "the doctor has run in both attempts"
        assert len(re.findall(r"^diloco\(period=8\): step 160, ", output, re.M)) == 1
        assert same(saved(folder, STEPS, 2), whole)


@pytest.mark.slow
def test_torchft_replicas_train_together(tmp_path):
    pytest.importorskip("torchft")
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer("[::]:0", 2, join_timeout_ms=2000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    variables = {"HEAD": "127.0.0.1", "TORCHFT_LIGHTHOUSE": address, "LACONIC_PLAN": PLAN}
    command = [str(CLUSTER / "torchft.sh"), "--steps", "40", "--replicas", "2", "--address", "127.0.0.1"]
    try:
        with launched([(command, variables)] * 2, tmp_path) as runs:
            assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output[-3000:] for run in runs)
            for run in runs:
                assert re.search(r"^diloco\(period=8\): step 40, 2 replicas, loss \d\.\d{4}, sent ", run.output, re.M)
    finally:
        lighthouse.shutdown()
