"""The states of all workers at the first one: bit for bit, and only what differs travels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from laconic.checkpoint import gathering
from laconic.checkpoint.gathering import gather_states
from laconic.ledger import Ledger
from tests.workers import run_workers

WORKERS = 3
SAME = torch.arange(1000.0)


def state_of(worker: int) -> dict[str | int, Any]:
    own = torch.full((17, 3), float(worker), dtype=torch.bfloat16)
    state: dict[str | int, Any] = {
        "same": SAME.clone(),
        "own": own,
        "step": worker,
        "pair": (worker, None),
        7: [own[0].clone()],
    }
    if worker == 2:
        state |= {"only here": torch.tensor(float("nan")), "empty": torch.empty(0, 4), "complex": torch.ones(2) * 1j}
    return state


def gather(worker: int, piece_bytes: int) -> Any:
    gathering.PIECE_BYTES = piece_bytes
    ledger = Ledger()
    mine = state_of(worker)
    states = gather_states(mine, ledger)
    if worker > 0:
        mine["same"].resize_(10**6)  # it is as it was: its memory can still be changed
    if worker == 0:
        assert states is not None
        assert all(state["same"] is states[0]["same"] for state in states)
        assert states[1]["own"] is not states[0]["own"]
    sent = {op: totals.wire_bytes for op, totals in ledger.totals(by="op").items()}
    assert set(ledger.totals(by="phase")) == {"checkpoint"}
    dist.barrier()
    return states, sent


def test_worker_0_gets_what_every_worker_has():
    for piece_bytes in (50, 1 << 20):
        (states, own), (_, one), (_, two) = run_workers(gather, WORKERS, args=(piece_bytes,))
        for worker, found in enumerate(states):
            expected = state_of(worker)
            assert str(found) == str(expected)  # the order of keys, types and values
            assert found["own"].dtype is torch.bfloat16 and torch.equal(found["own"], expected["own"])
        assert own["gather"] == 0 and one["gather"] == two["gather"] < SAME.nbytes, "what is the same is not sent"


def test_alone():
    state = state_of(0)
    assert gather_states(state, Ledger()) == [state]
