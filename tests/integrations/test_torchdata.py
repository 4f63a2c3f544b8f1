"""torchdata's StatefulDataLoader and the elastic sampler: its state is what was handed out, not what was read ahead."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.data import ElasticSampler
from tests.test_data import SIZE, Numbers

pytestmark = pytest.mark.frameworks
pytest.importorskip("torchdata")


def start(processes: int, batch_size: int) -> tuple[Any, ElasticSampler, Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach("ddp()", model, optimizer)
    sampler = ElasticSampler(Numbers(), session, batch=4, seed=1)
    loader = StatefulDataLoader(Numbers(), batch_size=batch_size, sampler=sampler, num_workers=processes)
    return session, sampler, loader


def take(session: laconic.Session, batches: Any, steps: int, batch_size: int) -> list[int]:
    seen: list[int] = []
    for _ in range(steps):
        for found in islice(batches, 4 // batch_size):
            seen += found.tolist()
        session.optimizers[0].step()
    return seen


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("batch_size", [4, 2])
@pytest.mark.parametrize("steps", [3, 10, 13])
def test_its_state_and_the_sessions_fit(processes, batch_size, steps):
    session, sampler, loader = start(processes, batch_size)
    whole = take(session, sampler.batches(loader), 24, batch_size)

    session, sampler, loader = start(processes, batch_size)
    seen = take(session, sampler.batches(loader), steps, batch_size)
    assert sampler.position == 4 * steps
    saved = {"loader": loader.state_dict(), "session": session.state_dict()}

    session, sampler, loader = start(processes, batch_size)
    session.load_state_dict(saved["session"])
    loader.load_state_dict(saved["loader"])
    seen += take(session, sampler.batches(loader), 24 - steps, batch_size)
    assert sampler.position == 4 * 24
    assert seen == whole
    assert sorted(seen[:SIZE]) == sorted(seen[SIZE : 2 * SIZE]) == list(range(SIZE))
