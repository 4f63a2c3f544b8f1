"""A plan that does less than its name says is named in the log of the first worker."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from tests.workers import listen, run_workers


class Vectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _attach(worker: int, text: str, vectors: bool) -> list[str]:
    model: nn.Module = Vectors() if vectors else nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    said = listen()
    with laconic.attach(text, model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass
    return said


@pytest.mark.parametrize(
    ("text", "vectors", "expected"),
    [
        (
            "power_sgd(rank=32)",
            False,
            "power_sgd(rank=32, bits=4) sends nothing of this model in rank 32: the largest matrix, 48 x 64, would not "
            "get 2 times smaller. All is sent as vectors and small tensors are. Take a smaller rank, or quantized",
        ),
        ("power_sgd(rank=4)", True, "in rank 4: it has no matrix"),
        ("power_sgd(rank=4)", False, None),
        ("quantized_ddp()", True, None),
        ("post_local_sgd(group=2)", False, "a group (2) is all 2 workers, which average exactly at every step"),
        ("hierarchical_sgd(groups={2: 2})", False, None),
    ],
)
def test_less_than_the_name_says(text, vectors, expected):
    first, second = run_workers(_attach, 2, (text, vectors))
    assert second == [] and len(first) == (expected is not None)
    assert expected is None or expected in first[0]


def _one_worker_a_machine(worker: int) -> list[str]:
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "1"
    return _attach(worker, "post_local_sgd(group='machine')", False)


def test_machines_of_one_worker():
    (said,), _ = run_workers(_one_worker_a_machine, 2)
    assert "a group ('machine') is one worker, so nothing is averaged inside groups." in said


def test_a_worker_alone_gets_no_warning():
    said = listen()
    model = nn.Linear(64, 48)
    with laconic.attach("post_local_sgd(group='machine')", model, torch.optim.SGD(model.parameters(), lr=0.1)):
        pass
    assert not [line for line in said if "a group" in line]
