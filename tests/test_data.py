"""The sampler whose position is global: every sample of an epoch is used once, whatever happens to the workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset

import laconic
from laconic import checkpoint
from laconic.data import ElasticSampler
from tests.workers import run_workers

SIZE = 37


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


# Without processes: what is dealt


@dataclass
class Alone:
    """A session of one of several workers, as the sampler sees it."""

    worker: int
    batches: tuple[int, ...]
    step: int = 0
    group: Any = None
    sharded: bool = False
    plan: laconic.Plan = field(default_factory=laconic.ddp)
    kept: dict[str, Any] = field(default_factory=dict)

    def gather(self, row: list[int]) -> list[list[int]]:
        return [[*row[:3], batch] for batch in self.batches]

    def keep(self, name: str, thing: Any) -> None:
        self.kept[name] = thing


def deal(batches: tuple[int, ...], **options: Any) -> list[tuple[Alone, ElasticSampler]]:
    sessions = [Alone(worker, batches) for worker in range(len(batches))]
    return [(s, ElasticSampler(SIZE, s, batch=batches[s.worker], **options)) for s in sessions]  # type: ignore[arg-type]


def use(workers: list[tuple[Alone, ElasticSampler]], steps: int, ahead: int) -> Iterator[list[int]]:
    """Take steps; the loaders read ahead. Yield the samples of each step."""
    readers = [(s, sampler, sampler.batches(_ReadsAhead(sampler, ahead))) for s, sampler in workers]
    for _ in range(steps):
        used = []
        for _, sampler, reader in readers:
            used += list(islice(reader, sampler.batch))
        for s, *_ in readers:
            s.step += 1
        yield used


class _ReadsAhead:
    def __init__(self, sampler: ElasticSampler, ahead: int) -> None:
        self.sampler, self.ahead, self.batch_size = sampler, ahead, 1

    def __iter__(self) -> Iterator[int]:
        waiting: list[int] = []
        for each in self.sampler:
            waiting.append(each)
            if len(waiting) > self.ahead:
                yield waiting.pop(0)
        yield from waiting


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_sample_of_an_epoch_is_used_once(seed, shuffle):
    """Workers come, go, and have other batches; some steps before each change are undone."""
    rng = random.Random(seed)
    used: list[list[int]] = []
    state: dict[str, Any] | None = None
    while sum(map(len, used)) < 5 * SIZE:
        batches = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 5)))
        workers = deal(batches, shuffle=shuffle, seed=seed)
        if state is not None:
            for _, sampler in workers:
                sampler.load_state_dict(state)
        states = [workers[0][1].state_dict()]
        steps = []
        for step in use(workers, rng.randint(0, 12), ahead=rng.randint(0, 9)):
            assert len(step) == sum(batches)
            steps.append(step)
            states.append(workers[-1][1].state_dict())
            assert all(sampler.state_dict() == states[-1] for _, sampler in workers)
        kept = rng.randint(0, len(steps))
        used += steps[:kept]
        state = states[kept]
    stream = [sample for step in used for sample in step]
    assert state is not None and state["position"] == len(stream)
    epochs = [stream[at : at + SIZE] for at in range(0, len(stream) - SIZE, SIZE)]
    assert all(sorted(epoch) == list(range(SIZE)) for epoch in epochs)
    assert all((a != b) == shuffle for a, b in pairwise(epochs))


def test_length_and_epochs_of_a_plain_loop():
    [(a, one), (b, other)] = deal((3, 2), seed=5)
    seen: list[int] = []
    for epoch in range(4):
        assert one.epoch == other.epoch == epoch
        mine, its = list(one), list(other)
        assert len(mine) == len(one) and len(its) == len(other) and len(mine) // 3 == len(its) // 2
        for k in range(len(mine) // 3):
            seen += mine[3 * k : 3 * k + 3] + its[2 * k : 2 * k + 2]
            a.step += 1
            b.step += 1
    assert sorted(seen[3 * SIZE : 4 * SIZE]) == list(range(SIZE))


def test_mistakes():
    for size, batch in ((0, 1), (5, 0), (5, 1.5)):
        with pytest.raises(ValueError, match="must be whole numbers of at least 1"):
            ElasticSampler(size, Alone(0, (1,)), batch=batch)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"ElasticSampler\(seed=-1\): the seed must be a whole number from 0"):
        ElasticSampler(5, Alone(0, (1,)), batch=1, seed=-1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Use torch's DistributedSampler"):
        ElasticSampler(5, Alone(0, (1,), sharded=True), batch=1)  # type: ignore[arg-type]
    [(_, sampler)] = deal((4,))
    for word, value in (("size", 38), ("seed", 1), ("shuffle", False)):
        with pytest.raises(ValueError, match=f"saved with {word} {value}, .* Make the sampler with {word}={value}"):
            sampler.load_state_dict(sampler.state_dict() | {word: value})
    with pytest.raises(ValueError, match=r"uses 4 samples, which is no multiple of it"):
        next(sampler.batches(DataLoader(Numbers(), batch_size=3, sampler=sampler)))
    with pytest.raises(ValueError, match="this loader has another sampler"):
        next(sampler.batches(DataLoader(Numbers(), batch_size=4)))
    draws = iter(sampler)
    next(draws)
    sampler.load_state_dict(sampler.state_dict())
    with pytest.raises(RuntimeError, match="Iterate over the DataLoader again"):
        next(draws)


@pytest.mark.parametrize(("batches", "steps"), [(2, 0), (1, 2), (0, 1)])
def test_steps_that_use_more_or_less_than_their_samples(batches, steps):
    [(session, sampler)] = deal((4,))
    reader = sampler.batches(DataLoader(Numbers(), batch_size=4, sampler=sampler))
    next(reader)
    session.step += 1
    for _ in range(batches - 1):
        next(reader)
    session.step += steps
    with pytest.raises(RuntimeError, match=r"ElasticSampler\(batch=4\): . steps took . samples, and each uses 4"):
        list(islice(reader, 2))


def test_a_loader_without_batches():
    [(_, sampler)] = deal((64,))
    loader = DataLoader(Numbers(), batch_size=64, sampler=sampler, drop_last=True)
    assert len(list(loader)) == 1, "the last step of an epoch is filled up"
    with pytest.raises(ValueError, match=r"batches\(list\): the loader has no batch"):
        next(sampler.batches([]))


def test_an_error_does_not_end_the_batches():
    """A worker is lost while a new group learns its batches: the next attempt goes on."""
    [(session, sampler)] = deal((4,))
    reader = sampler.batches(DataLoader(Numbers(), batch_size=4, sampler=sampler))
    first = next(reader).tolist()
    session.group, session.batches = "another", None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        next(reader)
    session.batches = (4,)
    assert next(reader).tolist() == first, "no step has used it"


def test_accumulated_batches_and_the_last_of_an_epoch():
    [(session, sampler)] = deal((4,))
    reader = sampler.batches(DataLoader(Numbers(), batch_size=2, sampler=sampler))
    seen = []
    for _ in range(40):
        seen += [*next(reader).tolist(), *next(reader).tolist()]
        session.step += 1
    assert [sorted(seen[at : at + SIZE]) for at in range(0, 4 * SIZE, SIZE)] == [list(range(SIZE))] * 4


# With processes: DDP, a DataLoader that reads ahead, checkpoints, another number of workers


def _train(
    worker: int, folder: str, before: int, batches: tuple[int, ...], steps: int, plan: str, processes: int
) -> tuple[list[list[int]], dict[str, Any]]:
    """Go on from what `before` workers have saved; return the samples of each step."""
    model = DDP(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    session = laconic.attach(plan, model, optimizer)
    sampler = ElasticSampler(Numbers(), session, batch=batches[worker], seed=3)
    if before:
        states = [checkpoint.load(folder, worker=each, workers=before).state["session"] for each in range(before)]
        session.load_state_dict(checkpoint.resize(states, len(batches))[worker])
    loader = DataLoader(Numbers(), batch_size=batches[worker], sampler=sampler, num_workers=processes)
    used = []
    for batch in islice(sampler.batches(loader), steps):
        model(batch.float()[:, None]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        used.append(batch.tolist())
    session.average_weights()
    checkpoint.save(folder, {"session": session.state_dict()}, step=session.step)
    session.detach()
    return used, sampler.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp()", "post_local_sgd(period=2)"])
def test_resuming_with_another_number_of_workers(tmp_path, plan):
    stream: list[int] = []
    before = 0
    for batches, steps, processes in (((3, 3), 4, 2), ((2, 4, 1), 4, 0), ((8,), 4, 1)):
        job = (str(tmp_path), before, batches, steps, plan, processes)
        results = run_workers(_train, before := len(batches), job, timeout_s=90)
        for step in range(steps):
            stream += [sample for used, _ in results for sample in used[step]]
        assert {state["position"] for _, state in results} == {len(stream)}
    assert len(stream) == 24 + 28 + 32
    assert Counter(stream[:SIZE]) == Counter(stream[SIZE : 2 * SIZE]) == Counter(range(SIZE))


def _disagree(worker: int) -> str:
    model = nn.Linear(1, 1)
    session = laconic.attach("ddp()", model, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        ElasticSampler(SIZE, session, batch=2, seed=worker)
    except laconic.DisagreementError as error:
        return str(error)
    return ""


def test_workers_that_deal_differently():
    for said in run_workers(_disagree, 2):
        assert "seed=1" in said and "seed=0" in said and "give all workers the same" in said


# What a session keeps


class Counts:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def attached() -> laconic.Session:
    model = nn.Linear(1, 1)
    return laconic.attach("ddp()", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_session_keeps_the_state_of_other_objects():
    session = attached()
    assert "kept" not in session.state_dict()
    session.keep("a", Counts(1))
    session.keep("b", Counts(2))
    with pytest.raises(ValueError, match=r"keep\('a', ...\): the session keeps another object of this name"):
        session.keep("a", Counts())
    saved = session.state_dict()
    early, late, again = Counts(), Counts(), attached()
    again.keep("a", early)
    again.load_state_dict(saved)
    assert again.state_dict()["kept"] == saved["kept"], "also what nobody has claimed yet"
    again.keep("b", late)
    assert (early.value, late.value) == (1, 2)
    lacking = attached()
    lacking.keep("c", Counts())
    with pytest.raises(ValueError, match=r"saved without 'c', which the session keeps. Load it first"):
        lacking.load_state_dict(saved)
    assert lacking.step == 0


def test_if_a_kept_object_refuses_its_state_nothing_is_loaded():
    saved = attached()
    saved.keep("a", Counts(1))
    ElasticSampler(SIZE, saved, batch=1)
    saved.step = 3
    state = saved.state_dict()
    session = attached()
    first, sampler = Counts(7), ElasticSampler(SIZE + 1, session, batch=1, name="z")
    session.keep("a", first)
    session.step = 2
    with pytest.raises(ValueError, match=f"saved with size {SIZE}, and ElasticSampler has {SIZE + 1}"):
        session.load_state_dict(state | {"kept": {"a": state["kept"]["a"], "z": state["kept"]["data"]}})
    assert (session.step, first.value, sampler.position) == (2, 7, 2)


def test_an_object_that_refuses_its_state_is_not_kept():
    session = attached()
    session.load_state_dict(session.state_dict() | {"kept": {"data": {"position": 1, "size": SIZE + 1}}})
    with pytest.raises(ValueError, match=f"saved with size {SIZE + 1}"):
        ElasticSampler(SIZE, session, batch=1)
    assert "data" not in session.kept and "data" in session.state_dict()["kept"]


def test_an_object_without_a_state_is_not_kept():
    session = attached()
    with pytest.raises(TypeError, match=r"keep\('a', list\): it needs the methods state_dict\(\) and load_state_dict"):
        session.keep("a", [])  # type: ignore[arg-type]
    assert not session.kept
