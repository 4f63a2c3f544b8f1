"""The lockstep wire: right answers, workers of one mind, and an error where a network would hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic import DesyncError
from laconic.comm import Exchange, First, Gather, Mean, Request, lockstep
from laconic.ledger import Ledger


def asking(*requests: Request) -> Exchange[list[Tensor]]:
    """Ask for each of `requests`, and return the answers."""
    answers = []
    for request in requests:
        answers.append((yield request))
    return answers


def answers(exchanges: Sequence[Exchange[list[Tensor]]], ledger: Ledger | None = None) -> list[list[Tensor]]:
    return lockstep(exchanges, ledger)


def test_mean_and_gather() -> None:
    xs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0]), torch.tensor([5.0, 1.0])]
    for mean, gathered in answers([asking(Mean(x.clone()), Gather(x.clone())) for x in xs]):
        assert torch.equal(mean, torch.tensor([3.0, 3.0]))
        assert torch.equal(gathered, torch.stack(xs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("request_type", [Mean, Gather, First])
def test_answers_keep_shape_and_dtype(dtype: torch.dtype, request_type: type[Mean | Gather | First]) -> None:
    ((answer,), _) = answers([asking(request_type(torch.ones(2, 3, dtype=dtype))) for _ in range(2)])
    assert answer.dtype == dtype
    assert answer.shape == ((2, 2, 3) if request_type is Gather else (2, 3))


@pytest.mark.parametrize("worker", [0, 2])
def test_one_workers_tensor(worker: int) -> None:
    for (got,) in answers([asking(First(torch.tensor([10 * each]), worker)) for each in range(3)]):
        assert got.tolist() == [10 * worker]


def test_fp16_does_not_overflow_in_the_sum() -> None:
    ((mean,), *_) = answers([asking(Mean(torch.tensor([60000.0], dtype=torch.float16))) for _ in range(4)])
    assert float(mean) == 60000


def test_workers_share_no_memory() -> None:
    for request_type in (Mean, Gather, First):
        first, second = (a for (a,) in answers([asking(request_type(torch.ones(3))) for _ in range(2)]))
        first.zero_()
        assert torch.equal(second, torch.ones_like(second))


def test_the_ledger_sees_worker_0() -> None:
    ledger = Ledger()
    answers([asking(Mean(torch.ones(5)), Gather(torch.ones(2))) for _ in range(3)], ledger)
    got = [(e.round, e.op, e.payload_bytes, e.wire_bytes, e.phase) for e in ledger.entries]
    assert got == [(1, "all_reduce", 20, 26, "test"), (2, "all_gather", 8, 16, "test")]


def test_an_exchange_may_ask_for_nothing() -> None:
    assert answers([asking(), asking()]) == [[], []]


@pytest.mark.parametrize(
    ("exchanges", "said"),
    [
        (
            [asking(Mean(torch.ones(12, 8))), asking(Gather(torch.ones(12, 8))), asking(Mean(torch.ones(12, 8)))],
            "worker 1 asked for Gather[12, 8] in torch.float32 while 2 others asked for Mean[12, 8] in torch.float32, "
            "in round 1.",
        ),
        (
            [asking(Mean(torch.ones(2))), asking(Mean(torch.ones(2))), asking(Mean(torch.ones(3)))],
            "worker 2 asked for Mean[3] in torch.float32 while 2 others asked for Mean[2] in torch.float32, "
            "in round 1.",
        ),
        (
            [asking(Mean(torch.ones(2))), asking(Mean(torch.ones(2).double()))],
            "worker 1 asked for Mean[2] in torch.float64 while 1 other asked for Mean[2] in torch.float32, in round 1.",
        ),
        (
            [asking(Mean(torch.ones(2)), Mean(torch.ones(2))), asking(Mean(torch.ones(2)))],
            "worker 1 asked for the end while 1 other asked for Mean[2] in torch.float32, in round 2.",
        ),
        (
            [asking(First(torch.ones(2))), asking(First(torch.ones(2))), asking(First(torch.ones(2), worker=1))],
            "worker 2 asked for First[2] in torch.float32 from worker 1 while 2 others asked for First[2] in "
            "torch.float32 from worker 0, in round 1.",
        ),
    ],
    ids=["operation", "shape", "dtype", "rounds", "source"],
)
def test_workers_that_part_are_named(exchanges: list[Exchange[Any]], said: str) -> None:
    with pytest.raises(DesyncError) as error:
        lockstep(exchanges)
    assert str(error.value) == (
        f"{said}\n  Every worker must ask for the same things in the same order. Does its data decide what it sends?"
    )


def test_workers_that_sum_differently_are_named() -> None:
    with pytest.raises(DesyncError):
        lockstep([asking(Mean(torch.ones(2))), asking(Mean(torch.ones(2), wide=True))])


def test_a_world_of_no_workers() -> None:
    assert lockstep([]) == []
