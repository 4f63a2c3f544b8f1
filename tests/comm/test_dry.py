"""The dry wire: the codec itself, on meta tensors, with nothing sent."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from laconic.codecs import Exact
from laconic.comm import Averaged, Exchange, First, Gather, Mean, Peers, dry
from laconic.ledger import Ledger


def each() -> Exchange[Averaged]:
    mean = yield Mean(torch.empty(5, device="meta"))
    gathered = yield Gather(torch.empty(2, 3, device="meta"))
    first = yield First(torch.empty(7, device="meta"))
    return Averaged({"mean": mean, "gathered": gathered, "first": first}, dict, lambda: torch.tensor(True))


def test_every_request_is_counted_and_answered_in_shape() -> None:
    ledger = Ledger()
    end = dry(each(), ledger, workers=4)
    assert end.mean["mean"].shape == (5,)
    assert end.mean["gathered"].shape == (4, 2, 3)
    assert end.mean["first"].shape == (7,)
    got = [(e.round, e.op, e.payload_bytes, e.wire_bytes, e.phase) for e in ledger.entries]
    assert got == [
        (1, "all_reduce", 20, 30, "plan"),
        (2, "all_gather", 24, 72, "plan"),
        (3, "broadcast", 28, 56, "plan"),
    ]


def test_real_tensors_do_too() -> None:
    x = torch.arange(3.0)
    assert torch.equal(dry(Exact().average({"x": x}, {}, Peers(0, 2)), Ledger(), workers=2).mean["x"], x)


def test_an_exchange_that_asks_for_nothing_costs_nothing() -> None:
    ledger = Ledger()
    dry(Exact().average({"none": torch.empty(0, device="meta")}, {}, Peers(0, 2)), ledger, workers=2, phase="gradient")
    assert ledger.collectives == 0


def endless() -> Exchange[Any]:
    x = torch.empty(1, device="meta")
    while True:
        yield Mean(x)


def test_a_codec_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("laconic.comm.dry")  # its function has the same name
    monkeypatch.setattr(module, "MOST_ROUNDS", 4)
    with pytest.raises(RuntimeError, match="a codec asked for a million rounds: it does not end"):
        dry(endless(), Ledger(), workers=2)
