"""A worker that is away on purpose: the others wait for it, for as long as it said."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import laconic
from tests.elastic.survivors import die, run_survivors
from tests.session.models import batch, mlp

TIMEOUT_S = 1.0


def _train(worker: int, what: str) -> tuple[str, list[int]]:
    """Worker 0 does something alone after step 3; return the error of this worker, if any."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), model, optimizer, timeout_s=TIMEOUT_S)
    try:
        for step in range(8):
            if worker == 0 and step == 3:
                _leave(session, what)
            x, y = batch(worker, step)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    except laconic.LostWorkerError as error:
        return str(error), error.missing
    return "", []


def _leave(session: laconic.Session, what: str) -> None:
    if what == "silently":
        time.sleep(4 * TIMEOUT_S)
    elif what == "overdue":
        with session.away(limit_s=0.5):
            time.sleep(5 * TIMEOUT_S)
    elif what == "dies":
        with session.away():
            die()
    else:
        with contextlib.suppress(KeyError), session.away(limit_s=60):
            time.sleep(3 * TIMEOUT_S)
            raise KeyError("also with an exception, it is back")


@pytest.mark.slow
@pytest.mark.parametrize(("what", "missing"), [("says so", []), ("silently", [0]), ("overdue", [0]), ("dies", [0])])
def test_the_others_wait_for_a_worker_that_said_so(what, missing):
    for said, found in run_survivors(_train, 3, 0, (what,)).values():
        assert found == missing and bool(said) == bool(missing), said


def test_a_limit_that_is_not_a_number_of_seconds_is_refused():
    model = nn.Linear(1, 1)
    with laconic.attach(laconic.ddp(), model, torch.optim.SGD(model.parameters())) as session:
        wrong: list[Any] = [0, -1, float("inf"), float("nan"), "600", None]
        for limit_s in wrong:
            with pytest.raises(ValueError, match="must be a number of seconds above 0, such as 600") as error:
                session.away(limit_s)
            assert str(error.value).startswith(f"away(limit_s={limit_s!r}): ")
        with session.away():  # a world of one: nobody waits
            pass
