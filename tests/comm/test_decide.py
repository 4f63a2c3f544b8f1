"""`Decide`: exchanges of one step keep their state together, or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from laconic.comm.lockstep import in_turn, lockstep
from laconic.comm.queue import CollectiveQueue
from laconic.exchange import Averaged, Decide, Exchange, Mean, all_true, by_itself
from laconic.ledger import Ledger
from tests.workers import run_workers

NOTHING = torch.empty(0)


def keeping(kept: dict[int, bool], name: int, value: float = 1.0, rounds: int = 2) -> Exchange[Averaged]:
    """Send `name` numbers in each round, and note the answer as the state."""
    x = torch.empty(0)
    for _ in range(rounds):
        x = yield Mean(torch.full((name,), value))
    ok = yield Decide(x.isfinite().all())
    kept[name] = bool(ok)
    return Averaged({"": x}, dict, lambda: ok, decided=True)


def stateless(value: float = 1.0) -> Exchange[Averaged]:
    x = yield Mean(torch.full((9,), value))
    return Averaged({"": x}, dict, lambda: x.isfinite().all())


def failing(error: BaseException) -> Exchange[Any]:
    yield Mean(torch.ones(7))
    raise error


def alone() -> CollectiveQueue:
    return CollectiveQueue(None, Ledger())


@pytest.mark.parametrize("bad", [None, 1, 2, "stateless"])
def test_all_exchanges_up_to_the_flush_get_one_answer(bad: Any) -> None:
    queue, kept = alone(), dict[int, bool]()
    value = {True: torch.nan, False: 1.0}
    futures = [queue.submit(keeping(kept, name, value[name == bad]), "test", NOTHING) for name in (1, 2)]
    other = queue.submit(stateless(value[bad == "stateless"]), "test", NOTHING)
    assert other.done() and not any(future.done() for future in futures) and not kept
    queue.flush()
    assert all(future.done() for future in futures)
    assert kept == dict.fromkeys((1, 2), bad is None)
    queue.run(keeping(kept, 3), "test")  # the next step is another one
    assert kept[3]


def test_a_void_flush_keeps_nothing() -> None:
    queue, kept = alone(), dict[int, bool]()
    future = queue.submit(keeping(kept, 1), "test", NOTHING)
    queue.flush(void=True)
    assert future.done() and kept == {1: False}
    queue.flush(void=True)  # of nothing
    queue.run(keeping(kept, 2), "test")
    assert kept == {1: False, 2: True}


def test_an_interrupt_leaves_no_exchange_behind() -> None:
    queue, kept = alone(), dict[int, bool]()
    queue.submit(keeping(kept, 1), "test", NOTHING)
    with pytest.raises(KeyboardInterrupt):
        queue.submit(failing(KeyboardInterrupt()), "test", NOTHING)
    queue.run(keeping(kept, 2), "test")
    assert kept == {2: True}


def test_an_error_ends_the_exchanges_that_are_held() -> None:
    queue, kept = alone(), dict[int, bool]()
    held = queue.submit(keeping(kept, 1), "test", NOTHING)
    failed = queue.submit(failing(ValueError("no such thing")), "test", NOTHING)
    queue.flush()
    for future in (held, failed):
        with pytest.raises(ValueError, match="no such thing"):
            future.wait()
    assert isinstance(queue.broken, ValueError) and not kept


def test_an_exchange_by_itself_asks_nobody() -> None:
    queue, kept = alone(), dict[int, bool]()
    assert queue.submit(by_itself(keeping(kept, 1)), "test", NOTHING).done() and kept == {1: True}
    queue.submit(by_itself(keeping(kept, 2, torch.nan)), "test", NOTHING)
    queue.run(keeping(kept, 3), "test")
    assert kept == {1: True, 2: False, 3: True}


def test_workers_in_lockstep_and_their_buckets_keep_together() -> None:
    kept: list[dict[int, bool]] = [{}, {}]
    values = [[1.0, 1.0], [1.0, torch.nan]]
    buckets = [[keeping(k, i + 1, v) for i, v in enumerate(row)] for k, row in zip(kept, values, strict=True)]
    ledger = Ledger()
    ends = lockstep([in_turn(each) for each in buckets], ledger)
    assert kept == [{1: False, 2: False}] * 2 and not any(bool(end.finite()) for worker in ends for end in worker)
    assert ledger.collectives == 4  # Decide sends nothing


def test_flags_join_without_waiting_for_a_device() -> None:
    yes, no, there = torch.tensor(True), torch.tensor(False), torch.ones((), dtype=torch.int32, device="meta")
    assert bool(all_true([yes, yes])) and not bool(all_true([yes, no]))
    assert all_true([yes, there]) is there
    assert all_true([no, there]).device == all_true([there, there]).device == there.device


def _order(worker: int, fail: bool) -> tuple[list[int], dict[int, bool], list[str]]:
    """Submit three exchanges of two rounds, and return the sizes of their messages in the order of the launches."""
    queue, kept, errors = CollectiveQueue(dist.group.WORLD, Ledger()), dict[int, bool](), list[str]()
    launched: list[int] = []
    all_reduce = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        launched.append(args[0].numel())
        return all_reduce(*args, **kwargs)

    dist.all_reduce = noted
    sick = torch.nan if worker == 1 else 1.0
    futures = [queue.submit(keeping(kept, name, sick if name == 2 else 1.0), "test", NOTHING) for name in (1, 2, 3)]
    if fail:
        futures.append(queue.submit(failing(ValueError("no such thing")), "test", NOTHING))
    queue.flush()
    for future in futures:
        try:
            future.wait()
        except ValueError as error:
            errors.append(str(error))
    queue.close()
    return launched, kept, errors


def test_held_exchanges_do_not_change_the_order_of_collectives() -> None:
    for launched, kept, errors in run_workers(_order, 2, (False,)):
        assert launched == [1, 2, 1, 3, 2, 3]
        assert kept == {1: False, 2: False, 3: False} and not errors


def test_an_error_ends_the_exchanges_that_the_thread_holds() -> None:
    for _, kept, errors in run_workers(_order, 2, (True,)):
        assert errors == ["no such thing"] * 4 and not kept
