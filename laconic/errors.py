"""Errors that a caller can act on. Those of training are raised on every worker that takes part.

A launcher such as Ray pickles the error of a worker, and calls its class with the message alone to read it again: so
every other argument has a default.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")


class DisagreementError(RuntimeError):
    """Workers have different settings, parameters or versions. The message names the first difference."""


class DesyncError(RuntimeError):
    """Workers are not at the same step, or not under the same plan."""


class NonFiniteError(RuntimeError):
    """NaN or Inf on some workers. `workers` are their indices; of a sharded model, those of the replicas."""

    def __init__(self, message: str, workers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.workers = list(workers)


class DivergedError(RuntimeError):
    """Weights that must be equal on all workers are not. `workers` are those in the minority."""

    def __init__(self, message: str, workers: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.workers = list(workers)


class LostWorkerError(RuntimeError):
    """A worker died, stopped or was disconnected. `missing` are the indices of those that did not respond."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged."""


class ElasticError(RuntimeError):
    """An elastic run cannot continue on this worker."""


class StoreLostError(ElasticError):
    """The store of the run does not answer: its host is down, or cannot be reached from here."""


class QuorumError(ElasticError):
    """Fewer workers than `least` are left, or none that holds the last committed step."""


class EndedError(ElasticError):
    """The run ended without this worker; the other workers hold its result."""


class ReplacedError(ElasticError):
    """Another process joined with this worker's id."""


class DamagedStateError(ElasticError):
    """The state that another worker sent was damaged on the way."""


def outliers(values: Sequence[Value]) -> tuple[Value, list[int]]:
    """Return the most common value, and the workers that have another.

    >>> outliers([4, 8, 4])
    (4, [1])
    """
    usual = Counter(values).most_common(1)[0][0]
    return usual, [worker for worker, each in enumerate(values) if each != usual]


def names(workers: Sequence[int], each: str = "worker") -> str:
    """Format workers for a message.

    >>> names([2]), names([1, 3])
    ('worker 2', 'workers 1, 3')
    """
    return f"{each}{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"


class PlanError(ValueError):
    """The text is not a plan. The message quotes the text, gives the rule, and says what to write instead."""
