"""The YAML of examples/cluster: known fields only, and what one place says fits what another needs."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest

import laconic
from tests.examples.launching import CLUSTER

pytestmark = pytest.mark.frameworks
yaml = pytest.importorskip("yaml")

VARIABLES = {
    "LACONIC_PLAN",
    "GLOO_SOCKET_IFNAME",
    *re.findall(r"\$\{?([A-Z]+)\b", (CLUSTER / "torchrun.sh").read_text()),
}
"""What torchrun.sh and the workers read."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CLUSTER / name).read_text()))


def plain(env: list[dict[str, Any]]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in env}


def test_kubernetes_parts_fit_together():
    service, claim, job = documents("kubernetes.yaml")
    pods = job["spec"]["template"]["spec"]
    [container] = pods["containers"]
    env, name = plain(container["env"]), job["metadata"]["name"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pods["subdomain"] == service["metadata"]["name"]
    assert env["HEAD"] == f"{name}-0.{pods['subdomain']}"  # the host name of the pod with index 0
    assert int(env["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert pods["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert container["args"] == ["--folder", container["volumeMounts"][0]["mountPath"]]
    assert {"NODES", "NODE", "HEAD"} < set(env) <= VARIABLES
    assert laconic.plan(env["LACONIC_PLAN"])


def test_kubeflow_parts_fit_together():
    [job] = documents("kubeflow-trainjob.yaml")
    _, claim, _ = documents("kubernetes.yaml")
    [patch] = job["spec"]["runtimePatches"]
    [replicated] = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]["template"]["spec"]
    assert pods["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    mounted = pods["containers"][0]["volumeMounts"][0]["mountPath"]
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "--no-python", "./worker.sh"]
    assert trainer["args"] == ["--folder", mounted]
    assert laconic.plan(plain(trainer["env"])["LACONIC_PLAN"])
    image = documents("kubernetes.yaml")[2]["spec"]["template"]["spec"]["containers"][0]["image"]
    assert trainer["image"] == image
    assert f"-t {image} ." in (CLUSTER / "Dockerfile").read_text()


def test_fields_are_those_of_the_published_models():
    """Reading drops unknown fields and refuses wrong types, so what is written again must be what was read."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    [train_job] = documents("kubeflow-trainjob.yaml")
    _, claim, job = documents("kubernetes.yaml")
    for kind, document in (
        (models.TrainerV1alpha1TrainJob, train_job),
        (models.IoK8sApiBatchV1JobSpec, job["spec"]),
        (models.IoK8sApiCoreV1PersistentVolumeClaimSpec, claim["spec"]),
    ):
        assert kind.from_dict(document).to_dict() == document
    train_job["spec"]["trainer"]["nodes"] = train_job["spec"]["trainer"].pop("numNodes")
    assert models.TrainerV1alpha1TrainJob.from_dict(train_job).to_dict() != train_job, "unknown fields are found"


def test_skypilot_numbers_the_machines_of_all_sites(tmp_path):
    [task] = documents("skypilot.yaml")
    assert set(task) <= {"name", "num_nodes", "resources", "envs", "workdir", "file_mounts", "setup", "run"}
    plan = laconic.plan(task["envs"]["LACONIC_PLAN"])
    assert plan.topology.inner == task["num_nodes"]  # with one worker on each machine, a site is a group
    stand_in = tmp_path / "examples" / "cluster" / "torchrun.sh"
    stand_in.parent.mkdir(parents=True)
    stand_in.write_text('#!/usr/bin/env bash\necho "$NODES $NODE $HEAD $ADDRESS $WORKERS $*"\n')
    stand_in.chmod(0o755)
    lines = []
    for site, head in (("0", ""), ("1", "10.0.0.1")):
        for node in range(2):
            addresses = f"10.{site}.0.1\n10.{site}.0.2"
            given = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node)}
            env = {"PATH": "/usr/bin:/bin", **task["envs"], **given, "SITE": site, "HEAD": head}
            run = ["bash", "-c", task["run"]]
            done = subprocess.run(run, cwd=tmp_path, env=env, check=True, capture_output=True, text=True, timeout=20)
            lines.append(done.stdout.splitlines()[-1])
    assert lines == [
        "4 0 10.0.0.1 10.0.0.1 1 --folder /checkpoints",
        "4 1 10.0.0.1 10.0.0.2 1 --folder /checkpoints",
        "4 2 10.0.0.1 10.1.0.1 1 --folder /checkpoints",
        "4 3 10.0.0.1 10.1.0.2 1 --folder /checkpoints",
    ]
    assert set(task["file_mounts"]) == {"/checkpoints"}
