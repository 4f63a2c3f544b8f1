"""What an elastic run is made of, without processes."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import laconic
from laconic import elastic
from laconic.data import ElasticSampler
from laconic.elastic.group import leave, receive, send
from laconic.elastic.history import Snapshot
from laconic.elastic.rendezvous import Member, Membership, Rendezvous, Rules
from laconic.elastic.run import CommitClock, objects_of
from laconic.elastic.store import BoundedStore, HeartbeatMonitor


def attached(plan="ddp()"):
    """Attach a plan to a small model, as if alone."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return laconic.attach(plan, model, optimizer), model, optimizer


def alone():
    """Join a run that has no other worker."""
    return elastic.join(HashStore(), id=0, heartbeat_timeout_s=0.5)


def membership(*held):
    members = [Member(str(i), f"{i}#x", generation, tuple(steps)) for i, (generation, *steps) in enumerate(held)]
    return Membership(5, 9, tuple(members))


def test_members_continue_from_the_newest_step_that_all_of_the_last_generation_hold():
    found = membership((3, 8, 9), (7, 20, 21), (7, 19, 20), (0, 0))
    assert (found.base, found.source, found.receivers) == (20, 1, [0, 3])


def test_snapshots_in_memory_count_more_than_those_read_from_a_disk():
    lives, restarted = Member("0", "0#x", 7, (20, 21)), Member("1", "1#y", 7, (14, 20), in_memory=False)
    found = Membership(5, 9, (restarted, lives))
    assert (found.base, found.source, found.receivers) == (21, 1, [0])


def test_of_disks_without_a_common_step_the_newest_counts():
    held = [(7,), (14, 21), (14,)]
    members = tuple(Member(str(i), f"{i}#x", 7, steps, in_memory=False) for i, steps in enumerate(held))
    found = Membership(5, 9, members)
    assert (found.base, found.source, found.receivers) == (21, 1, [0, 2])


def test_in_the_first_generation_all_receive_the_state_of_the_first():
    found = membership((0, 0), (0, 0), (0, 0))
    assert (found.base, found.receivers) == (0, [1, 2])


def test_saved_snapshots_wait_for_a_living_worker_that_may_hold_newer_ones():
    store = BoundedStore(HashStore())
    monitor = HeartbeatMonitor(store, "1", "1#b", heartbeat_timeout_s=30.0)
    try:
        store.add("heartbeat/0#a", 1)
        rendezvous = Rendezvous(store, monitor, Rules(least=1, expect=1, wait_s=0.2))
        rendezvous.confirm(Membership(4, 7, (Member("0", "0#a", 6, (20,)), Member("1", "1#a", 6, (20,)))))
        with pytest.raises(elastic.QuorumError, match=r"generation 7, and worker '0'.* may have committed more"):
            rendezvous.join(Member("1", "1#b", 7, (20,), in_memory=False), is_over=lambda: False)
        found = rendezvous.join(Member("1", "1#b", 7, (20, 21)), is_over=lambda: False)
        assert found is not None and found.base == 21, "a worker that holds it in memory need not wait"
    finally:
        monitor.close()


def test_a_worker_that_gives_up_later_than_another_says_how_many_came():
    store, errors = BoundedStore(HashStore()), {}

    def wait(id: str, wait_s: float) -> None:
        monitor = HeartbeatMonitor(store, id, f"{id}#a", heartbeat_timeout_s=0.2)
        try:
            rendezvous = Rendezvous(store, monitor, Rules(least=3, expect=3, wait_s=wait_s))
            rendezvous.join(Member(id, f"{id}#a", 0, (0,)), is_over=lambda: False)
        except elastic.QuorumError as error:
            errors[id] = str(error)
        monitor.close()

    threads = [threading.Thread(target=wait, args=(id, wait_s)) for id, wait_s in (("0", 2.0), ("1", 1.0))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert "2 of at least 3 workers came within 1 s" in errors["1"]
    assert "2 of at least 3 workers came within 2 s" in errors["0"], "it saw worker 1, which has given up since"


def test_numbers_come_before_words_and_are_sorted_by_value():
    members = [Member(id, id, 0, ()) for id in ("10", "b", "2", "a")]
    assert [m.id for m in sorted(members, key=lambda m: m.order)] == ["2", "10", "a", "b"]


def transferred(parts, damage=None):
    """Send and receive through a list; `damage` is the index of a tensor in which one bit is flipped."""
    sent = []
    send(parts, lambda t: sent.append(t.clone()))
    if damage is not None:
        sent[damage].view(torch.uint8)[0] ^= 1
    queue = iter(sent)
    return receive(lambda t: t.copy_(next(queue)))


def test_state_is_transferred_bit_for_bit_without_residuals():
    parts: dict[str, Any] = {
        "model": {"w": torch.randn(3, 4), "n": torch.tensor(7), "half": torch.randn(5).bfloat16()},
        "optimizer 0": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]},
        "session": {"step": 12, "state": {"gradient": {"residual": {"w": torch.ones(3)}, "q": torch.randn(2, 2)}}},
        "also x": {"complex": torch.randn(2, dtype=torch.complex64), "nothing": torch.zeros(0)},
    }
    got = transferred(parts)
    assert got["session"]["state"]["gradient"].keys() == {"q"}
    assert got["optimizer 0"]["param_groups"] == parts["optimizer 0"]["param_groups"]
    for part, name in (("model", "w"), ("model", "n"), ("model", "half"), ("also x", "complex")):
        assert torch.equal(got[part][name], parts[part][name]) and got[part][name].dtype == parts[part][name].dtype


def test_a_bit_that_flips_in_a_transfer_is_found():
    with pytest.raises(elastic.DamagedStateError, match="another SHA-256 than what was sent"):
        transferred({"model": {"w": torch.randn(3, 4)}}, damage=2)


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

    never = threading.Event()

    def add(self, key, amount):
        self.never.wait(60)


def test_a_store_that_does_not_answer_is_lost_for_all_callers():
    store = BoundedStore(Hung(), limit_s=0.2)
    store.set("a", "1")
    assert store.get("a") == b"1" and store.check(["a"]) and store.read(["a", "b"]) is None
    try:
        with pytest.raises(elastic.StoreLostError, match=r"no answer for 0.2 s"):
            store.add("n", 1)
        with pytest.raises(elastic.StoreLostError):
            store.check(["a"])
    finally:
        Hung.never.set()


def test_a_wait_for_a_key_can_be_cancelled():
    store = BoundedStore(HashStore())

    def check():
        raise RuntimeError("cancelled")

    with store.cancelled_by(check), pytest.raises(RuntimeError, match="cancelled"):
        store.get("never")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"id": "a/b"}, r"join\(id='a/b'\): id must be a number or a word"),
        ({"id": None}, r"join\(id=None\)"),
        ({"id": 1, "run": ""}, r"join\(run=''\)"),
        ({"id": 1, "least": 0}, r"1 <= least <= expect"),
        ({"id": 1, "least": 3, "expect": 2}, r"join\(least=3, expect=2\)"),
        ({"id": 1, "heartbeat_timeout_s": 0}, r"join\(heartbeat_timeout_s=0\)"),
    ],
)
def test_join_refuses_wrong_arguments(given, message, monkeypatch):
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
    world = elastic.join(HashStore(), id="alone", heartbeat_timeout_s=0.5)
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


def test_no_group_is_kept_alive_for_a_fragment_that_a_commit_has_waited_for(monkeypatch):
    kept: list[float] = []

    def note(timeout_s: float, *others: object) -> None:
        kept.append(timeout_s)
        leave(timeout_s, *others)

    monkeypatch.setattr("laconic.elastic.run.leave", note)
    session, model, optimizer = attached("streaming_diloco(period=2, fragments=2, delay=1)")
    world = alone()
    with elastic.Run(world, session, model, optimizer) as run:
        for step in run.steps(100):
            with step:
                run.stop()
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        assert session.in_flight and session.step == 2
    assert kept == [0, 0]  # before the first group, and at the end


def test_an_error_in_the_body_of_a_step_is_raised():
    session, model, optimizer = attached()

    def train() -> None:
        with elastic.Run(alone(), session, model, optimizer) as run:
            for step in run.steps(5):
                with step:
                    raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not dist.is_initialized()


@pytest.mark.parametrize("lost", [False, True])
def test_a_sampler_that_is_made_in_the_loop_is_refused(lost):
    """It would be missing in the snapshot to which a loss takes the run back."""
    session, model, optimizer = attached()

    def train() -> None:
        with elastic.Run(alone(), session, model, optimizer) as run:
            for step in run.steps(5):
                with step:
                    ElasticSampler(8, session, batch=1)
                    if lost:
                        raise laconic.LostWorkerError("worker 1 is gone", [1])
                    model(torch.ones(1, 2)).sum().backward()
                    optimizer.step()

    with pytest.raises(RuntimeError, match=r"keeps 'data' only since step 0, .* before the loop over run.steps"):
        train()
    assert not dist.is_initialized()


def test_weights_are_averaged_in_copies():
    """A lost worker may still write into buffers of an abandoned collective: these are not the weights."""
    session, model, optimizer = attached("post_local_sgd(period=2)")
    with session:
        objects_of(session, model, optimizer, None)
        assert session.commit == "atomic"


@pytest.mark.parametrize("given", [{"every": 0}, {"save_every": True}, {"every": 1.5}])
def test_run_refuses_wrong_counts(given):
    (session, model, optimizer), world = attached(), alone()
    with session, pytest.raises(ValueError, match=r"must be a whole number of at least 1"):
        elastic.Run(world, session, model, optimizer, **given)
    world.leave()


def test_run_refuses_workers_that_never_synchronise():
    (session, model, optimizer), world = attached("alone()"), alone()
    with session, pytest.raises(ValueError, match=r"Choose a plan that synchronises, such as laconic.diloco"):
        elastic.Run(world, session, model, optimizer)
    world.leave()


@pytest.mark.parametrize(
    ("plan", "gap"),
    [
        ("ddp()", 1),
        ("diloco(period=4)", 4),
        ("streaming_diloco(period=4, fragments=4, delay=0)", 1),
        ("streaming_diloco(period=16, fragments=4, delay=1)", 4),
        (
            "streaming_diloco(period=2, fragments=2, delay=1)",
            2,
        ),  # from here on, one is in flight after every step
        ("Plan(Streaming(4, 4, 1))", 4),
        ("Plan(Streaming(6, 2, 5))", 6),
    ],
)
def test_a_step_is_committed_at_least_once_a_period_also_with_fragments_in_flight(plan, gap):
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with laconic.attach(laconic.plan(plan), model, optimizer) as session:
        clock, ends = CommitClock(session), [0]
        for _ in range(40):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if clock.is_due():
                ends.append(session.step)
    delay = getattr(session.plan.schedule, "delay", 0)
    between = {later - earlier for earlier, later in itertools.pairwise(ends[1:])}
    assert between == {gap} and ends[1] <= session.plan.schedule.period + delay, ends
