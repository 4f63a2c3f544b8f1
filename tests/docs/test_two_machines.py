"""docs/two_machines.md and docs/ports.md: their commands, on two hosts with two workers each."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import hosts, needs_root

DOCS = Path(__file__).parents[2] / "docs"
pytestmark = [*needs_root, pytest.mark.slow]


def block(page: str, start: str) -> str:
    """Return the block of a page that begins with such a fence."""
    found: list[str] = re.findall(rf"^```{start}\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)
    assert len(found) == 1
    return found[0]


def train(tmp_path: Path, plan: str = "", firewall: str = "") -> list[str]:
    """Run the program and the commands of two_machines.md on two hosts; return what was printed.

    A `plan` takes the place of the page's; the commands of a `firewall` come first.
    """
    (tmp_path / "train.py").write_text(block("two_machines.md", "python torchrun"))
    (commands,) = re.findall(r"^```sh\n(export .*?)^```", (DOCS / "two_machines.md").read_text(), re.M | re.S)
    commands = commands.replace("--nproc-per-node 4", "--nproc-per-node 2")
    if plan:
        commands = re.sub(r'LACONIC_PLAN="[^"]*"', f'LACONIC_PLAN="{plan}"', commands)
    commands = commands.replace("torchrun ", f"{shlex.quote(sys.executable)} -m torch.distributed.run ")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(DOCS.parent)}
    with hosts(2) as made:
        assert made[0][1] == "10.77.0.1", "the page says so"
        processes = []
        for node, (name, _) in enumerate(made):
            text = firewall + commands.replace("--node-rank 0", f"--node-rank {node}")
            command = ["ip", "netns", "exec", name, "bash", "-ec", text]
            process = subprocess.Popen(
                command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            processes.append(process)
        try:
            outputs = [process.communicate(timeout=200)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0], outputs[0][-3000:] + outputs[1][-3000:]
    return outputs


def test_the_commands_train_the_plan_that_they_name(tmp_path):
    sent = [int(each) for each in re.findall(r"wire_bytes=(\d+)", "".join(train(tmp_path)))]
    exact = 64 * 1.5 * 4 * (2 * 512 * 1024 + 1024 + 512)
    assert len(sent) == 4, "all workers are one level"
    assert max(sent) < exact / 40


def test_two_machines(tmp_path):
    printed = "".join(train(tmp_path, "diloco(group='machine')"))
    found = re.findall(r"^worker (\d): loss ([\d.]+), (.*)$", printed, re.M)
    assert sorted(worker for worker, _, _ in found) == ["0", "1", "2", "3"]
    for _, loss, totals in found:
        assert float(loss) < 1, "it starts at about 1.3"
        across, inside = (int(each) for each in re.findall(r"wire_bytes=(\d+)", totals))
        assert "'world'" in totals and "'groups of 2'" in totals and across < inside / 100


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nftables")
def test_the_ports_that_must_be_open_suffice(tmp_path):
    others = "nft insert rule inet training incoming iif != lo ct state new tcp dport != { 29500, 40000-40999 } drop\n"
    assert "worker 3" in "".join(train(tmp_path, firewall=block("ports.md", "sh firewall") + others))
