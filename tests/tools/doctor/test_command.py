"""`laconic doctor` as a user runs it."""

from __future__ import annotations

import json
import re

import pytest

from laconic.cli.doctor import show
from laconic.tools.doctor.checks import Finding
from tests.cli.conftest import here

__all__ = ["here"]

TRAINING = """
import sys, torch, torch.distributed as dist, laconic
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
laconic.attach(laconic.plan_from_env(), model, optimizer, timeout_s=3)
for _ in range(int(sys.argv[1])):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
"""


def test_this_machine(here, tmp_path):
    path = tmp_path / "findings.json"
    ended = here("doctor", "--json", str(path), "--data", str(tmp_path))
    found = json.loads(path.read_text())
    assert {"versions", "gloo", "gloo's interface", "open files", "threads"} <= {f["name"] for f in found["findings"]}
    assert set(found["findings"][0]) == {"name", "severity", "found", "why", "way_out", "workers"}
    assert set(found["versions"]) == {"laconic", "torch", "python"}
    assert ended.code == int(not found["ok"]) == 1
    assert f"problem: data: --data {tmp_path}: the folder has no files\n    This worker has nothing" in ended.out
    assert "\n    Mount the disk on this host, or correct the path.\n" in ended.out
    assert not ended.out.splitlines()[-1].startswith("no problem")


def test_a_table_in_a_terminal(capsys):
    show([Finding("links [x]", "problem", "slow", "All wait.", "Look.")], plain=False)
    printed = capsys.readouterr().out
    assert "what to do" in printed
    assert "links [x]" in printed
    assert "All wait. Look." in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--inject", "burn:1@2", "--script", "SCRIPT"], "--inject 'burn:1@2' is not a fault"),
        (["--inject", "kill:1@2"], "--inject kill:1@2: a fault needs a training. Give one with --script train.py."),
        (
            ["--inject", "kill:2@2", "--workers", "2", "--script", "SCRIPT"],
            "there are 2 workers, counted from 0.",
        ),
        (["--", "5"], "-- 5: these are for a script."),
        (["--script", "no/such.py"], "--script no/such.py: there is no such file."),
        (["--script", "SCRIPT", "--workers", "0"], "--workers 0: there must be at least 1."),
        (["--script", "SCRIPT", "--seconds", "0"], "--seconds 0: it must be a number above 0."),
        (["--workers", "0"], "--workers 0: there must be at least 1."),
        (["--workers", "-2"], "--workers -2: there must be at least 1."),
        (["--seconds", "-1"], "--seconds -1: it must be a number above 0."),
        (["--timeout", "nan"], "--timeout nan: it must be a number above 0."),
        (["--timeout", "0"], "--timeout 0: it must be a number above 0."),
        (["--json", "."], "--json .: that is a folder."),
    ],
)
def test_mistakes(here, tmp_path, arguments, words):
    script = tmp_path / "train.py"
    script.touch()
    ended = here("doctor", *(str(script) if word == "SCRIPT" else word for word in arguments))
    assert (ended.code, ended.out) == (2, "")
    assert words in " ".join(ended.err.split())


def test_faults_are_not_for_workers_that_run_already(here, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    ended = here("doctor", "--inject", "kill:1@2")
    assert ended.code == 2
    assert "torchrun has already started the workers" in ended.err
    assert "LACONIC_OBSERVERS=laconic.tools.doctor.injection:from_env" in ended.err


@pytest.mark.slow
def test_a_killed_worker_and_the_error_of_the_other(here, tmp_path):
    script, path = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(TRAINING)
    given = ["--script", str(script), "--workers", "2", "--seconds", "60", "--json", str(path)]
    ended = here("doctor", "--inject", "kill:1@3", "--inject", "nan:0@99", *given, "--", "20")
    found = {each["name"]: each for each in json.loads(path.read_text())["findings"]}
    assert found["fault kill:1@3"]["severity"] == "ok"
    assert found["fault nan:0@99"]["found"] == "not injected: worker 0 did not reach step 99"
    assert found["worker 1"]["found"] == "killed by SIGKILL, as the fault demands"
    assert found["worker 0"]["severity"] == "ok", found["worker 0"]
    assert re.search(r"\d s after the fault: [\w.]*LostWorkerError: step 3", found["worker 0"]["found"])
    assert ended.code == 1  # a fault was not injected


BATCH_NORM = """
import torch, torch.distributed as dist, laconic
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
laconic.attach(laconic.plan_from_env(), model, optimizer, timeout_s=3)
for _ in range(8):
    model(torch.randn(16, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inject", "words"),
    [
        ("kill:1@3", r"exit code 1, .*LostWorkerError: step \d.*worker 1 did not respond"),
        ("stop:1@3", r"exit code 1, .*LostWorkerError: step \d.*worker 1 did not respond"),
        ("nan:1@3", r"exit code 0; it logged, .*step 3.*worker 1"),
    ],
)
def test_faults_of_a_model_with_batch_norm_under_ddp_are_named_by_all_survivors(here, tmp_path, inject, words):
    script, path = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(BATCH_NORM)
    given = ["--script", str(script), "--workers", "3", "--seconds", "120", "--json", str(path)]
    here("doctor", "--inject", inject, *given)
    found = {each["name"]: each for each in json.loads(path.read_text())["findings"]}
    assert found[f"fault {inject}"]["found"] == "injected"
    for survivor in ("worker 0", "worker 2"):
        assert re.search(words, found[survivor]["found"]), found
        assert found[survivor]["severity"] == "ok"
