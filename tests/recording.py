"""Short trainings under every kind of plan, and what is recorded of them.

    python -m tests.recording            # writes tests/recorded.json

A change that is not meant to change results leaves the recording as it is: losses, the ledger's totals and the saved
state of each worker, bit for bit. `tests/test_recorded.py` compares.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.workers import run_workers

FILE = Path(__file__).with_name("recorded.json")
WORKERS = (2, 3, 4)
DEFAULTS = {
    "ddp()": 12,
    "quantized_ddp()": 8,
    "power_sgd()": 8,
    "streaming_diloco(2, 2, 0)": 8,
    "streaming_diloco(4, 4, 0)": 12,
    "streaming_diloco(8, 4, 1)": 20,
    "diloco()": 34,
    "streaming_diloco()": 36,
    "sparse_loco()": 12,
    "post_local_sgd(start=5, period=4)": 20,
    "hierarchical_sgd(GROUPS)": 12,
    "qsr(growth=0.02, floor=3)": 12,
}
"""The plans that people use, with their steps: all is synchronised at least twice, and what may be in flight at the
end is. Every number of workers trains them, on every kind of model."""
WIDE = [*DEFAULTS][1:9]
"""Those that compress what is large enough: matrices that rank 32 shrinks, and chunks of 4096 numbers."""
OTHERS = {
    "power_sgd(rank=2, bits=None, rounds='alternating')": 8,
    "power_sgd(rank=4, bits=None, start=3)": 8,
    'Plan(codec=ErrorFeedback(Cast("bf16")))': 12,
    "diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())": 20,
    'diloco(period=4, lr=0.7, momentum=0.9, codec=ByShape(ErrorFeedback(LowRank(2))), optimizer_state="average")': 12,
    "streaming_diloco(period=4, fragments=2, delay=1, lr=0.7, momentum=0.9, codec=Exact())": 20,
    "streaming_diloco(period=4, fragments=2, delay=1, lr=0.7, momentum=0.9, codec=Exact(), mix=0.5)": 20,
    'Plan(schedule=Every(5), codec=ErrorFeedback(Cast("bf16")), outer=Optim("AdamW", {"lr": 0.01}))': 20,
}
"""What else a plan may say. 2 and 4 workers train them."""
LARGE = (
    "post_local_sgd(start=5, period=4)",
    "diloco(period=4, lr=0.7, momentum=0.9, codec=Exact())",
    "streaming_diloco(4, 4, 0)",
)
KINDS = ("ddp", "bare", "fsdp")
"""How a model is wrapped. "wide" models have larger matrices; "large bare" has several MB, sent in several pieces."""
GROUPS = {2: "{2: 1, 4: 2}", 3: "{2: 1, 4: 3}", 4: "{2: 2, 4: 4}"}


class Net(nn.Module):
    """Matrices that compress, vectors that do not, BatchNorm's buffers, and a parameter of one element."""

    def __init__(self, width: int = 24, hidden: int = 33) -> None:
        super().__init__()
        self.inner = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(self.norm(self.inner(x))))) * self.scale
        return y


def cases(workers: int) -> Iterator[tuple[str, str, int]]:
    """List the plans that this many workers train, the kinds of model, and the steps."""
    for kind in KINDS:
        for plan, steps in (DEFAULTS if workers == 3 else DEFAULTS | OTHERS).items():
            if kind == "fsdp" and "hierarchical" in plan:
                continue  # refused: sharded models have their groups in the mesh
            yield plan.replace("GROUPS", GROUPS[workers]), kind, steps
        for plan in WIDE:
            yield plan, f"wide {kind}", DEFAULTS[plan]
    for plan in LARGE if workers == 4 else ():
        yield plan, "large bare", 12


def record(workers: int) -> dict[str, Any]:
    """Train every case with real workers; return what is compared, by "kind: plan".

    What all workers have alike is there once; else it is a list of one value a worker.
    """
    results = run_workers(_train_all, workers, timeout_s=300)
    return {case: _merged([worker[case] for worker in results]) for case in results[0]}


def _merged(workers: list[Any]) -> Any:
    if isinstance(workers[0], dict):
        return {key: _merged([worker[key] for worker in workers]) for key in workers[0]}
    return workers[0] if all(worker == workers[0] for worker in workers) else workers


def _train_all(worker: int) -> dict[str, Any]:
    workers = torch.distributed.get_world_size()
    return {f"{kind}: {plan}": _train(worker, plan, kind, steps) for plan, kind, steps in cases(workers)}


def _train(worker: int, plan: str, kind: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, group = _model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = laconic.attach(laconic.plan(plan), model, optimizer, group=group)
    losses = [step(model, optimizer, worker, number) for number in range(steps)]
    state = session.state_dict()
    session.detach()
    return {
        "loss": losses[-1],
        "losses": digest(losses),
        "weights": digest({name: _local(p) for name, p in model.named_parameters()}),
        "buffers": digest({name: _local(b) for name, b in model.named_buffers()}),
        "ledger": totals(session.ledger),
        "state": {key: digest(value) for key, value in sorted(state.items()) if key != "plan"},
    }


def _model(kind: str) -> tuple[nn.Module, Any]:
    size, kind = kind.split() if " " in kind else ("", kind)
    model = Net(*{"": (), "wide": (160, 256), "large": (512, 2000)}[size])
    if kind == "ddp":
        return DDP(model, bucket_cap_mb=0.1 if size else 0.002), None  # several buckets
    if kind == "bare":
        return model, None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    workers = torch.distributed.get_world_size()
    replicas = 3 if workers == 3 else 2
    mesh = init_device_mesh("cpu", (replicas, workers // replicas), mesh_dim_names=("replicate", "shard"))
    model.norm = nn.Identity()  # type: ignore[assignment]  # FSDP leaves buffers whole
    fully_shard(model.up, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    return model, mesh["replicate"].get_group()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, worker: int, number: int) -> float:
    """Take one step on data that differs between workers and steps."""
    generator = torch.Generator().manual_seed(1000 * number + worker)
    x = torch.randn(16, 8, generator=generator)
    loss = F.mse_loss(model(x), torch.tanh(x[:, :1] - 2 * x[:, 1:2]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def plain() -> str:
    """Train without laconic: where this gives other bits, the machine computes otherwise, and bits tell nothing."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [step(model, optimizer, 0, number) for number in range(20)]
    qr = torch.linalg.qr(torch.randn(33, 4, generator=torch.Generator().manual_seed(0))).Q
    return digest([losses, *model.parameters(), qr])


def totals(ledger: laconic.Ledger) -> dict[str, list[int]]:
    """Sum the ledger up by phase and level: collectives, payload bytes, bytes on the network."""
    sums: dict[str, list[int]] = {}
    for entry in ledger.entries:
        row = sums.setdefault(f"{entry.phase} {entry.level}", [0, 0, 0])
        for place, number in enumerate((1, entry.payload_bytes, entry.wire_bytes)):
            row[place] += number
    return dict(sorted(sums.items()))


def digest(tree: Any) -> str:
    """Mix dicts, lists, numbers, text and tensors into 64 bits."""
    hashed = hashlib.sha256()
    for part in _parts(tree):
        hashed.update(part)
    return hashed.hexdigest()[:16]


def _parts(tree: Any) -> Iterator[bytes]:
    if isinstance(tree, Tensor):
        yield f"{tree.dtype}{list(tree.shape)}".encode()
        yield tree.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(tree, Mapping):
        for key in sorted(tree, key=str):
            yield str(key).encode()
            yield from _parts(tree[key])
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        for each in tree:
            yield from _parts(each)
    else:
        yield repr(tree).encode()


def _local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def write(recorded: Mapping[str, Any]) -> None:
    """Write the recording, one line a case."""
    lines = [json.dumps(key) + ": " + json.dumps(recorded[key], sort_keys=True) for key in sorted(recorded)]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    cases_of = {workers: record(workers) for workers in WORKERS}
    write({"plain": plain()} | {f"{n} {case}": found for n, each in cases_of.items() for case, found in each.items()})
