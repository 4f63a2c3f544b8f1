"""The ledger against the kernel: wire bytes are what the network interface counted."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.namespaces import needs_root, run_on_hosts

pytestmark = needs_root

# Large enough that connection set-up, acknowledgements and barriers are small beside it.
PLANS = {
    "ddp()": 4,
    "power_sgd(rank=64, bits=None, min_compression=0)": 24,
    "quantized_ddp(bits=4)": 16,
    "Plan(schedule=Every(2), codec=ErrorFeedback(Quantized(2)))": 48,
    "post_local_sgd(period=2)": 8,
    "Plan(codec=Cast('bf16'))": 8,
    "Plan(schedule=Every(2), codec=Cast('bf16'))": 16,
    "ddp()  # with 4 MB of buffers": 4,
}


def worker(index: int, workers: int, leader: str) -> None:
    """Train under each plan; print what the ledger and the interface say was sent."""
    dist.init_process_group("gloo", init_method=f"tcp://{leader}:29500", rank=index, world_size=workers)
    counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
    results = {}
    for text, steps in PLANS.items():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024))  # 8 MB
        if "buffers" in text:
            module.register_buffer("statistics", torch.zeros(1024, 1024))
        model = DDP(module, bucket_cap_mb=2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session = laconic.attach(laconic.plan(text.partition("  #")[0]), model, optimizer)
        dist.barrier()
        before = int(counter.read_text()) - retransmitted()
        for _ in range(steps):
            F.mse_loss(model(torch.randn(2, 1024)), torch.zeros(2, 1024)).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        results[text] = (session.ledger.wire_bytes, int(counter.read_text()) - retransmitted() - before)
        session.detach()
    sys.stdout.write(json.dumps(results))


def retransmitted() -> int:
    """Bytes that open connections have sent again: TCP takes it for a loss if a machine stands still for a moment."""
    shown = subprocess.run(["ss", "-tiH"], check=True, capture_output=True, text=True, timeout=20).stdout
    return sum(map(int, re.findall(r"bytes_retrans:(\d+)", shown)))


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_wire_bytes_are_the_interfaces_bytes(workers):
    code = "import sys; from tests.session.test_interface import worker as w; w(*map(int, sys.argv[1:3]), sys.argv[3])"
    for out in run_on_hosts(workers, code, "{rank}", "{workers}", "{leader}"):
        for text, (ledger, interface) in json.loads(out).items():
            assert abs(ledger - interface) <= 0.03 * interface, f"{text}: ledger {ledger}, interface {interface}"
