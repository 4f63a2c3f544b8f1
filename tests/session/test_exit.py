"""A program that never detaches ends well: no thread of ours, or of our process group, outlives the interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import atexit, os, threading

def gloo():  # how many threads of gloo there are
    return sum("gloo" in open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))

def tell():  # in one write: two workers share the pipe
    left = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    os.write(1, f"left: {left}, our group: {2 * gloo() > running}\\n".encode())

atexit.register(tell)

import torch, torch.distributed as dist
import laconic

dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = laconic.attach(laconic.ddp(), model, optimizer)
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
running = gloo()  # of two groups alike, torch's and the one that `attach` has made
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_program_that_does_not_detach(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, str(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("left: [], our group: False") == 2, done.stdout
    assert "terminate called" not in done.stderr
