"""A run resumed from a checkpoint repeats every bit, also with matrices large enough for vectorised sums."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from laconic import checkpoint
from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from tests.session.models import weights
from tests.workers import listen, run_workers

SAVED_AT, STEPS = 3, 6


class Layers(nn.Module):
    """Matrices of odd sizes: in a bucket, most begin in the middle of a cache line."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.matrices = nn.ParameterList(nn.Parameter(0.1 * torch.randn(257, 513)) for _ in range(6))
        self.vectors = nn.ParameterList(nn.Parameter(torch.zeros(257)) for _ in range(3))

    def forward(self, worker: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * worker + step)
        losses = [(p * (p + torch.randn(p.shape, generator=generator))).sum() for p in self.parameters()]
        return torch.stack(losses).sum()


class Run:
    """A model, its optimizer, and a session or one of the twin's hook states."""

    def __init__(self, text: str, way: str, bucket_mb: float) -> None:
        self.module = Layers()
        self.model: nn.Module = self.module if way == "bare" else DDP(self.module, bucket_cap_mb=bucket_mb)
        self.optimizer: torch.optim.Optimizer = (
            laconic.optim.DeMo(self.model.parameters(), lr=0.1)
            if text.startswith("demo")
            else torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        )
        self.method: Any = None
        if way == "twin":
            self.method = PowerSGDState(None, **eval(text), start_powerSGD_iter=2, min_compression_rate=2)  # noqa: S307
            self.model.register_comm_hook(self.method, powerSGD_hook)  # type: ignore[operator]
        else:
            self.method = laconic.attach(laconic.plan(text), self.model, self.optimizer)

    def train(self, worker: int, steps: range) -> None:
        for step in steps:
            self.model(worker, step).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def _resumed(worker: int, text: str, way: str, bucket_mb: float, folder: str) -> tuple[Tensor, Tensor]:
    straight = Run(text, way, 1.2)
    straight.train(worker, range(SAVED_AT))
    saved = {"model": straight.module.state_dict(), "optimizer": straight.optimizer.state_dict()}
    checkpoint.save(folder, {**saved, "method": straight.method.state_dict()}, step=SAVED_AT)
    straight.train(worker, range(SAVED_AT, STEPS))
    loaded = checkpoint.load(folder).state
    resumed = Run(text, way, bucket_mb)
    resumed.module.load_state_dict(loaded["model"])
    resumed.optimizer.load_state_dict(loaded["optimizer"])
    resumed.method.load_state_dict(loaded["method"])
    resumed.train(worker, range(SAVED_AT, STEPS))
    return weights(straight.module), weights(resumed.module)


PLANS = [f"power_sgd(rank={rank}, rounds={rounds!r})" for rank in (1, 2, 4) for rounds in ("two", "alternating")]
TWIN = [
    "{'matrix_approximation_rank': 1}",
    "{'matrix_approximation_rank': 4}",
    "{'matrix_approximation_rank': 2, 'use_error_feedback': False}",
]


@pytest.mark.parametrize(
    ("text", "way", "bucket_mb"),
    [
        ("power_sgd(rank=2, bits=None)", "ddp", 2.0),
        ("demo()", "ddp", 1.2),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                *[(text, "ddp", 1.2) for text in PLANS],
                ("power_sgd()", "ddp", 25.0),
                ("power_sgd(rank=2, feedback=False)", "ddp", 1.2),
                ("power_sgd()", "bare", 0),
                ("demo(bits=8)", "bare", 0),
                ("power_sgd(rank=4, bits=None)", "bare", 0),
                *[(text, "twin", 1.2) for text in TWIN],
            ]
        ],
    ],
)
def test_a_resumed_run_repeats_the_bits_of_large_matrices(text, way, bucket_mb, tmp_path):
    for straight, resumed in run_workers(_resumed, 2, (text, way, bucket_mb, str(tmp_path))):
        assert torch.equal(straight, resumed), f"off by {(straight - resumed).abs().max():.1e}"


def _forget(worker: int, text: str, kind: str, load: bool) -> list[str]:
    """Resume from the model and the optimizer alone, or with the session's state, too."""
    torch.manual_seed(0)
    net, said = nn.Linear(4, 4), listen()
    saved: dict[str, Any] = {}
    state: dict[str, Any] = {}
    for resumed in (False, True):
        model = DDP(net)
        made: Any = {"AdamW": torch.optim.AdamW, "SGD": partial(torch.optim.SGD, momentum=0.9)}[kind]
        optimizer = made(model.parameters(), lr=0.1)
        with laconic.attach(text, model, optimizer) as session:
            if resumed:
                assert said == [], "a fresh optimizer is nothing to warn of"
                optimizer.load_state_dict(saved)
                if load:
                    session.load_state_dict(state)
            for _ in range(3):
                model(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            saved, state = optimizer.state_dict(), session.state_dict()
    return said


@pytest.mark.parametrize(
    ("text", "kind", "load", "steps"),
    [
        ("power_sgd(rank=1, min_compression=0)", "AdamW", False, 3),
        ("diloco(period=2)", "SGD", False, 1),
        ("post_local_sgd(period=2)", "AdamW", True, None),
        ("ddp()", "AdamW", False, None),
    ],
)
def test_a_resume_that_forgot_the_state_of_the_workers_is_named(text, kind, load, steps):
    first, second = run_workers(_forget, 2, (text, kind, load))
    assert second == [] and len(first) == (steps is not None)
    if steps is not None:
        assert f"has taken {steps} steps or more, and the session none: no session.load_state_dict() came" in first[0]
        assert "let every worker save its own session.state_dict() and load it" in first[0]
