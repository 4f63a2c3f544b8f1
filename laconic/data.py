"""Data that is neither lost nor repeated when a run resumes, changes its number of workers, or loses one.

    sampler = laconic.data.ElasticSampler(len(dataset), session, batch=8)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=2)
    for x, y in sampler.batches(loader):
        ...

All workers read one stream: a permutation of the dataset, then another, without end. A step of the session uses the
next samples of the stream, `batch` of them on each worker, in the order of the workers:

    stream    17  4 |  8  0 | 11  3 |  9  1 |  2  6 | ...
    step 1      0   |   1   |   2   |                       three workers, with batch=2
    step 2                          |   0   |   1   |       worker 2 was lost

So one number says what was used by all: the position in the stream. It follows the session's steps: samples that a
DataLoader has read ahead are not used yet. It is part of `session.state_dict()`, and the same on all workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Sampler

from laconic.errors import DisagreementError
from laconic.session.session import Session
from laconic.values import is_whole

T = TypeVar("T")


class ElasticSampler(Sampler[int]):
    """Deals a dataset to the workers of a session: each sample of an epoch is used once, whatever happens to workers.

    Every worker makes it, after `attach`. Iterating yields this worker's samples until the end of the epoch, from the
    position on. The last step of an epoch is filled up with the first samples of the next one, so each step is whole.

    Args:
        data: The dataset, or its size. All workers have the same one.
        session: The session whose steps use the samples, and whose state the position is a part of.
        batch: How many samples this worker uses in a step of the optimizer, accumulated batches together. It may differ
            between workers.
        shuffle: Whether each epoch has another order, that of torch's DistributedSampler.
        seed: The seed of these orders.
        name: The name of its state in the session's. Two samplers of one session need two.

    Raises:
        DisagreementError: On all workers, if they differ in dataset size, seed or shuffle.
    """

    def __init__(
        self,
        data: Sized | int,
        session: Session,
        *,
        batch: int,
        shuffle: bool = True,
        seed: int = 0,
        name: str = "data",
    ) -> None:
        size = data if isinstance(data, int) else len(data)
        if not is_whole(size) or not is_whole(batch):
            raise ValueError(
                f"ElasticSampler({size!r}, session, batch={batch!r}): the size of the dataset and the samples of a "
                "step must be whole numbers of at least 1."
            )
        if not is_whole(seed, 0) or seed >= 2**62:  # plus the epoch it must be a seed of torch's
            raise ValueError(f"ElasticSampler(seed={seed!r}): the seed must be a whole number from 0 to 2**62 - 1.")
        if session.sharded:
            raise ValueError(
                "ElasticSampler: the model is sharded, and its session knows the workers that hold the same shards, "
                "not all that read data. Use torch's DistributedSampler, and save its epoch and position."
            )
        session.plan.check_by_steps("ElasticSampler")
        self.size, self.batch, self.shuffle, self.seed = size, batch, shuffle, seed
        self._session = session
        self._version = 0
        """Grows when the samples that come next are others: what was read ahead is then of no use."""
        self._orders: dict[int, Tensor] = {}
        """Of the epochs that are read now: the order of their samples."""
        self.drawn = 0
        """How many samples `batches` has handed out in this process."""
        self._base, self._base_step = 0, session.step
        """A position, and the session's step at which it was reached."""
        self._learn_batches()
        session.keep(name, self)

    # Where it is

    @property
    def position(self) -> int:
        """How many samples all workers together have used, since the beginning of the first epoch."""
        return self._base + (self._session.step - self._base_step) * self._step_size

    @property
    def epoch(self) -> int:
        """The epoch of the next sample, from 0."""
        return self.position // self.size

    def __len__(self) -> int:
        """Return how many samples this worker has until the end of the epoch. Sends nothing."""
        left = self.size - self.position % self.size
        return -(-left // self._step_size) * self.batch

    def __iter__(self) -> Iterator[int]:
        """Iterate over this worker's samples until the end of the epoch."""
        self._refresh()
        return _Draws(self)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Iterate over a DataLoader that has this sampler, epoch after epoch, without end.

        When the session is resumed or gets other workers, what the loader has read ahead is dropped, and it starts
        again from the position of then. A step must take exactly `batch` samples: anything else is an error.
        """
        if getattr(loader, "sampler", self) is not self:
            raise ValueError(
                f"batches({type(loader).__name__}): this loader has another sampler. Make it with "
                "DataLoader(dataset, batch_size=..., sampler=sampler)."
            )
        size = getattr(loader, "batch_size", None) or self.batch
        if self.batch % size:
            raise ValueError(
                f"batches(DataLoader(batch_size={size})): a step uses {self.batch} samples, which is no multiple of "
                "it. Make ElasticSampler(batch=...) the samples of all batches that are accumulated in a step."
            )
        return _Batches(self, loader, size)

    # Its state

    def state_dict(self) -> dict[str, Any]:
        """Return the position: what was used by the session's steps, the same on all workers."""
        return {"position": self.position, "size": self.size, "shuffle": self.shuffle, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position, with any number of workers."""
        for word in ("size", "shuffle", "seed"):
            if state[word] != (own := getattr(self, word)):
                raise ValueError(
                    f"this position was saved with {word} {state[word]!r}, and ElasticSampler has {own!r}: another "
                    f"order of samples, in which it means nothing. Make the sampler with {word}={state[word]!r}."
                )
        self._go_to(state["position"])

    def _go_to(self, position: int) -> None:
        self._base, self._base_step = position, self._session.step
        self._version += 1

    # Who gets what

    def _refresh(self) -> None:
        """Learn the batches of the others, if the session has another group. All workers call it at the same step."""
        self._session.plan.check_by_steps("ElasticSampler")
        if self._session.group is not self._group:
            position = self.position
            self._learn_batches()
            self._go_to(position)

    def _learn_batches(self) -> None:
        """Gather how many samples of a step each worker uses."""
        group = self._session.group
        rows = self._session.gather([self.size, self.shuffle, self.seed, self.batch])
        for row in rows:
            if row[:3] != rows[0][:3]:
                raise DisagreementError(
                    f"ElasticSampler: one worker has size={row[0]}, shuffle={bool(row[1])}, seed={row[2]}, another "
                    f"size={rows[0][0]}, shuffle={bool(rows[0][1])}, seed={rows[0][2]}. All deal the same dataset in "
                    "the same order: give all workers the same."
                )
        batches = [row[3] for row in rows]
        self._step_size, self._offset = sum(batches), sum(batches[: self._session.worker])
        self._group = group  # last: if a worker is lost before, the next group gathers again

    def _sample(self, place: int) -> int:
        """Return the sample at a place of the stream."""
        epoch, index = divmod(place, self.size)
        if not self.shuffle:
            return index
        if epoch not in self._orders:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + epoch))
            self._orders = {key: kept for key, kept in self._orders.items() if abs(key - epoch) == 1} | {epoch: order}
        return int(self._orders[epoch][index])


class _Batches(Iterator[T]):
    """The batches of a loader, without end. No generator: an error, such as a lost worker's, does not end it."""

    def __init__(self, sampler: ElasticSampler, loader: Iterable[T], size: int) -> None:
        self._sampler, self._loader, self._size = sampler, loader, size
        self._version = -1

    def __next__(self) -> T:
        s = self._sampler
        s._refresh()
        if self._version != s._version:
            self._begin()
        self._check(less_than=s.batch)
        try:
            found = next(self._found)
        except StopIteration:
            self._check(less_than=1)
            self._begin()
            try:
                found = next(self._found)
            except StopIteration:
                raise ValueError(
                    f"batches({type(self._loader).__name__}): the loader has no batch. Leave out drop_last."
                ) from None
        self._taken += self._size
        s.drawn += self._size
        return found

    def _begin(self) -> None:
        """Start the loader, at the sampler's position. torchdata's may load that now."""
        self._found = iter(self._loader)
        self._version, self._first, self._taken = self._sampler._version, self._sampler._session.step, 0

    def _check(self, less_than: int) -> None:
        """Refuse to go on unless all samples that were taken have been used, but for fewer than `less_than`."""
        steps, batch = self._sampler._session.step - self._first, self._sampler.batch
        if not 0 <= self._taken - steps * batch < less_than:
            raise RuntimeError(
                f"ElasticSampler(batch={batch}): {steps} steps took {self._taken} samples, and each uses {batch}. "
                "Let `batch` be the samples of all batches that are accumulated, and count a step that is left out "
                "with session.skip()."
            )


class _Draws(Iterator[int]):
    """The samples of this worker until the end of an epoch. Its state is what was drawn, for torchdata's loader."""

    def __init__(self, sampler: ElasticSampler) -> None:
        self._sampler, self._version = sampler, sampler._version
        self._step, self._drawn = sampler.position, 0
        """The position at which the step begins that is drawn, and how many of its samples this worker has drawn."""
        self._end = (sampler.epoch + 1) * sampler.size

    def __next__(self) -> int:
        s = self._sampler
        if self._version != s._version or s._session.group is not s._group:
            raise RuntimeError(
                "ElasticSampler: the session was resumed or has other workers, and what comes next are other samples. "
                "Iterate over the DataLoader again, or use sampler.batches(loader), which does."
            )
        if self._drawn == s.batch:
            self._step, self._drawn = self._step + s._step_size, 0
        if self._step >= self._end:
            raise StopIteration
        self._drawn += 1
        return s._sample(self._step + s._offset + self._drawn - 1)

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step, "drawn": self._drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the last batch that torchdata's loader has handed out: all of it has been used."""
        s = self._sampler
        self._step, self._drawn = state["step"], state["drawn"]
        self._end = (self._step // s.size + 1) * s.size
        s._go_to(self._step + (s._step_size if self._drawn == s.batch else 0))
        self._version = s._version
