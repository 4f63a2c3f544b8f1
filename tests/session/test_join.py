"""DDP's `join()`, where workers run out of data at different times; and sparse gradients under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import assert_equal_bits, batch, mlp, weights
from tests.workers import listen, run_workers


def _uneven(worker: int, text: str | None, bad: bool = False) -> tuple[Tensor, int, list[str]]:
    """Train 3, 5 and 7 steps inside join(), and 4 after it. Without a plan, with DDP alone."""
    said = listen()
    module = nn.Sequential(nn.BatchNorm1d(32), mlp())
    ddp = DDP(module, bucket_cap_mb=0.005)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)  # join() leaves momentum different
    session = None
    if text is not None:
        session = laconic.attach(laconic.plan(text), ddp, optimizer, verify_every=2)
        session.stop_on()

    def train(steps: range) -> None:
        for step in steps:
            x, y = batch(worker, step)
            if bad and worker == 2 and step == 5:
                x[0] = torch.nan
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    with ddp.join():
        train(range(3 + 2 * worker))
    train(range(10, 14))
    return weights(module), session.step if session else 11, said


@pytest.mark.parametrize(
    "text",
    [
        "ddp()",
        pytest.param("power_sgd(rank=1, min_compression=0, start=6)", marks=pytest.mark.slow),
    ],
)
def test_workers_may_run_out_of_data(text):
    results = run_workers(_uneven, 3, (text,))
    assert_equal_bits([result for result, _, _ in results])
    assert [step for _, step, _ in results] == [11, 11, 11], "a worker without data counts the others' steps"
    if text == "ddp()":
        torch.testing.assert_close(results[0][0], run_workers(_uneven, 3, (None,))[0][0], rtol=1e-5, atol=1e-6)


def test_nan_inside_join_is_left_out_without_asking_who_had_it():
    results = run_workers(_uneven, 3, ("power_sgd(rank=1, min_compression=0)", True))
    assert_equal_bits([result for result, _, _ in results])
    assert results[0][0].isfinite().all()
    assert any("step 6: some worker had NaN or Inf" in text for text in results[2][2])


def _local(worker: int, text: str) -> str:
    ddp = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    laconic.attach(laconic.plan(text), ddp, optimizer)
    x, y = batch(worker, 0)
    with ddp.join():
        F.cross_entropy(ddp(x), y).backward()
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
    return str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "post_local_sgd(period=4)",
        pytest.param("diloco(period=4, start=9)", marks=pytest.mark.slow),
    ],
)
def test_plans_that_average_weights_are_refused_inside_join(text):
    for said in run_workers(_local, 2, (text,)):
        assert said.startswith(f"{text} inside DDP's join(): a worker that has run out of data takes no part")
        assert "use a plan that averages gradients in every step, such as ddp()" in said


def _sparse(worker: int, table: type[Any]) -> str:
    ddp = DDP(nn.Sequential(nn.Linear(4, 4), table(10, 4, sparse=True)))
    with pytest.raises(ValueError, match="sparse gradients") as error:
        laconic.attach(laconic.ddp(), ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    return str(error.value)


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_under_ddp(table):
    for said in run_workers(_sparse, 2, (table,)):
        assert said == (
            f"attach: {table.__name__} '1' has sparse gradients, which DistributedDataParallel passes on as they are, "
            "and no codec takes. Make it with sparse=False, or attach to the bare module, which averages sparse "
            "gradients as dense ones."
        )


def _made_sparse_later(worker: int) -> str:
    module = nn.Embedding(10, 4, sparse=True)
    ddp = DDP(module)
    module.sparse = False
    laconic.attach(laconic.ddp(), ddp, torch.optim.SGD(ddp.parameters(), lr=0.1))
    module.sparse = True
    with pytest.raises(RuntimeError, match="a parameter has sparse gradients") as error:
        ddp(torch.tensor([1, 2])).sum().backward()
    return str(error.value)


def test_a_sparse_bucket_is_refused_in_backward():
    run_workers(_made_sparse_later, 1)
