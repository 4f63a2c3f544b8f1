"""Who says something else than most, and how workers are named in what we say of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

Said = TypeVar("Said")


def outliers(said: Sequence[Said]) -> tuple[Said, list[int]]:
    """What most workers say, and who says something else.

    >>> outliers([4, 8, 4])
    (4, [1])
    """
    usual = Counter(said).most_common(1)[0][0]
    return usual, [worker for worker, each in enumerate(said) if each != usual]


def names(workers: Sequence[int]) -> str:
    """Workers in words.

    >>> names([2]), names([1, 3])
    ('worker 2', 'workers 1, 3')
    """
    return f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
