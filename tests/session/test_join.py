"""DDP's `join()` is refused; and so are sparse gradients under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import laconic
from tests.session.models import batch, mlp
from tests.workers import run_workers


def _inside(worker: int, text: str) -> str:
    ddp = DDP(mlp())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    laconic.attach(text, ddp, optimizer)
    x, y = batch(worker, 0)
    with ddp.join():
        F.cross_entropy(ddp(x), y).backward()
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
    return str(error.value)


@pytest.mark.parametrize("text", ["ddp()", "post_local_sgd(period=4)"])
def test_join_is_refused(text):
    for said in run_workers(_inside, 2, (text,)):
        assert said.startswith(f"{text} inside DDP's join(): a worker that has run out of data cannot take part")
        assert "Give all workers as many batches" in said


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
