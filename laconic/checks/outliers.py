"""Which workers differ from the majority, and how messages name workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

Value = TypeVar("Value")


def outliers(values: Sequence[Value]) -> tuple[Value, list[int]]:
    """Return the most common value, and the workers that have another.

    >>> outliers([4, 8, 4])
    (4, [1])
    """
    usual = Counter(values).most_common(1)[0][0]
    return usual, [worker for worker, each in enumerate(values) if each != usual]


def names(workers: Sequence[int]) -> str:
    """Format workers for a message.

    >>> names([2]), names([1, 3])
    ('worker 2', 'workers 1, 3')
    """
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
