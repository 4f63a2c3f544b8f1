"""The parts of an elastic run, without processes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import laconic
from laconic import elastic
from laconic.elastic.members import Meetings, Members, Rules, Seat
from laconic.elastic.parts import parts_of
from laconic.elastic.snapshot import Snapshot, receive, send
from laconic.elastic.store import BoundedStore
from laconic.elastic.watch import Watch


def members(*held):
    seats = [Seat(str(i), f"{i}#x", generation, tuple(steps)) for i, (generation, *steps) in enumerate(held)]
    return Members(5, 9, tuple(seats))


def test_members_go_on_from_the_newest_round_that_all_insiders_hold():
    found = members((3, 8, 9), (7, 20, 21), (7, 19, 20), (0, 0))
    assert found.base == 20 and found.source == 1
    assert [found.receives(worker) for worker in range(4)] == [True, False, False, True]
    assert Members.from_text(found.to_text()) == found


def test_what_was_read_from_a_disk_counts_less_than_what_is_in_memory():
    there, back = Seat("0", "0#x", 7, (20, 21)), Seat("1", "1#y", 7, (14, 20), in_memory=False)
    found = Members(5, 9, (back, there))
    assert found.base == 21 and found.source == 1 and found.receives(0)


def test_of_disks_without_a_common_round_the_newest_counts():
    seats = tuple(Seat(str(i), f"{i}#x", 7, steps, in_memory=False) for i, steps in enumerate([(7,), (14, 21), (14,)]))
    found = Members(5, 9, seats)
    assert found.base == 21 and found.source == 1
    assert [found.receives(worker) for worker in range(3)] == [True, False, True]


def test_at_the_very_start_all_take_over_the_state_of_the_first():
    found = members((0, 0), (0, 0), (0, 0))
    assert found.base == 0 and [found.receives(worker) for worker in range(3)] == [False, True, True]


def test_what_is_on_disks_does_not_go_on_while_one_lives_who_holds_more():
    store = BoundedStore(HashStore())
    watch = Watch(store, "run", "1", "1#b", silence_s=30.0)
    try:
        store.add("run/beat/0#a", 1)
        meetings = Meetings(store, "run", watch, Rules(least=1, expect=1, wait_s=0.2))
        meetings.confirmed(Members(4, 7, (Seat("0", "0#a", 6, (20,)), Seat("1", "1#a", 6, (20,)))))
        with pytest.raises(elastic.QuorumError, match=r"generation 7, and worker '0'.* may have committed more"):
            meetings.meet(Seat("1", "1#b", 7, (20,), in_memory=False), over=lambda: False)
        there = meetings.meet(Seat("1", "1#b", 7, (20, 21)), over=lambda: False)
        assert there is not None and there.base == 21, "who has it in memory need not wait"
    finally:
        watch.close()
        store.close()


def test_numbers_come_before_words_and_in_their_order():
    ids = ["10", "b", "2", "a"]
    assert [s.id for s in sorted((Seat(id, id, 0, ()) for id in ids), key=lambda s: s.order)] == ["2", "10", "a", "b"]


def handed_over(parts, spoil=None):
    """Send and receive through a list; `spoil` is a letter to change a byte of."""
    letters = []
    send(parts, lambda t: letters.append(t.clone()))
    if spoil is not None:
        letters[spoil].view(torch.uint8)[0] ^= 1
    queue = iter(letters)

    def take(t):
        t.copy_(next(queue))

    return receive(take)


def test_state_is_handed_over_bit_for_bit_but_for_residuals():
    parts: dict[str, Any] = {
        "model": {"w": torch.randn(3, 4), "n": torch.tensor(7), "half": torch.randn(5).bfloat16()},
        "optimizer 0": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "talk": {"step": 12, "state": {"gradient": {"residual": {"w": torch.ones(3)}, "q": torch.randn(2, 2)}}},
        "also x": {"complex": torch.randn(2, dtype=torch.complex64), "nothing": torch.zeros(0)},
    }
    got = handed_over(parts)
    assert got["session"]["state"]["gradient"].keys() == {"q"}
    assert got["optimizer 0"]["param_groups"] == parts["optimizer 0"]["param_groups"]
    for part, name in (("model", "w"), ("model", "n"), ("model", "half"), ("also x", "complex")):
        assert torch.equal(got[part][name], parts[part][name]) and got[part][name].dtype == parts[part][name].dtype


def test_a_flipped_bit_on_the_way_is_found():
    with pytest.raises(elastic.DamagedStateError, match="another SHA-256 than what was sent"):
        handed_over({"model": {"w": torch.randn(3, 4)}}, spoil=2)


def test_a_snapshot_is_a_copy_both_ways():
    model = torch.nn.Linear(2, 2)
    snapshot = Snapshot.of({"model": model}, step=1)
    before = model.weight.detach().clone()
    for _ in range(2):
        torch.nn.init.zeros_(model.weight)
        snapshot.restore({"model": model})
        assert torch.equal(model.weight, before)


class Hung(HashStore):
    """A store whose host has lost its power."""

    def add(self, key, amount):
        time.sleep(30)


def test_a_store_that_does_not_answer_is_lost_for_all_callers():
    store = BoundedStore(Hung(), limit_s=0.2)
    store.set("a", "1")
    assert store.get("a") == b"1" and store.check(["a"]) and store.read(["a", "b"]) is None
    begun = time.monotonic()
    with pytest.raises(elastic.StoreLostError, match=r"no answer for 0.2 s"):
        store.add("n", 1)
    with pytest.raises(elastic.StoreLostError):
        store.check(["a"])
    assert time.monotonic() - begun < 5


def test_a_wait_for_a_key_can_be_called_off():
    store = BoundedStore(HashStore())

    def call_off():
        raise RuntimeError("pointless")

    store.call_off = call_off
    with pytest.raises(RuntimeError, match="pointless"):
        store.get("never")
    store.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": "a/b"}, r"join\(id='a/b'\): id must be a number or a word"),
        ({"id": None}, r"join\(id=None\)"),
        ({"id": 1, "run": ""}, r"join\(run=''\)"),
        ({"id": 1, "least": 0}, r"1 <= least <= expect"),
        ({"id": 1, "least": 3, "expect": 2}, r"join\(least=3, expect=2\)"),
        ({"id": 1, "silence_s": 0}, r"join\(silence_s=0\)"),
    ],
)
def test_join_refuses_what_cannot_be(given, message, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match=message):
        elastic.join(HashStore(), **given)


def test_an_address_is_host_and_port():
    with pytest.raises(ValueError, match="host:port"):
        elastic.join("node-0", id=1)


def test_a_run_of_one_worker_is_plain_training():
    torch.manual_seed(0)
    model, twin = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    twin.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    session = laconic.attach(laconic.ddp(), model, optimizers[0])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    committed: list[elastic.Committed] = []
    world = elastic.join(HashStore(), id="alone", silence_s=0.5)
    with elastic.Run(
        world, session, model, optimizers[0], also={"scheduler": scheduler}, every=2, on_commit=committed.append
    ) as run:
        for step in run.steps(5):
            with step:
                model(torch.full((1, 3), float(step.number))).sum().backward()
                optimizers[0].step()
                scheduler.step()
                optimizers[0].zero_grad()
    other = torch.optim.lr_scheduler.StepLR(optimizers[1], 2)
    for number in range(1, 6):
        twin(torch.full((1, 3), float(number))).sum().backward()
        optimizers[1].step()
        other.step()
        optimizers[1].zero_grad()
    assert torch.equal(model.weight, twin.weight) and not dist.is_initialized()
    assert [(c.since, c.step, c.workers) for c in committed] == [
        (0, 2, ("alone",)),
        (2, 4, ("alone",)),
        (4, 5, ("alone",)),
    ]


def test_an_error_of_the_body_is_the_users():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = laconic.attach(laconic.ddp(), model, optimizer)

    def train() -> None:
        with elastic.Run(elastic.join(HashStore(), id=0, silence_s=0.5), session, model, optimizer) as run:
            for step in run.steps(5):
                with step:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not dist.is_initialized()


def test_weights_are_averaged_in_copies():
    """What a worker that was given up says later may be written where it was expected: not into the weights."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(laconic.post_local_sgd(period=2), model, optimizer) as session:
        parts_of(session, model, optimizer, None)
        assert session._weight_sync.commit == "atomic"
