"""Turn the states of a number of workers into those of another number, without losing or duplicating residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.checkpoint.workers import is_whole

RESIDUAL = "residual"


def resize(
    states: Sequence[Mapping[str, Any]], workers: int, *, conserve: Literal["sum", "mean"] = "sum"
) -> list[dict[str, Any]]:
    """Turn the `session.state_dict()` of each old worker into those of `workers` workers.

    >>> old = [{"state": {"gradient": {"residual": {"w": torch.tensor([x])}}}} for x in (1.0, 2.0, 4.0)]
    >>> [state["state"]["gradient"]["residual"]["w"].item() for state in resize(old, workers=2)]
    [3.0, 4.0]
    >>> [state["state"]["gradient"]["residual"]["w"].item() for state in resize(old, workers=4)]
    [1.0, 2.0, 4.0, 0.0]

    Workers that stay keep their residuals, and get an equal share of those of the workers that leave. Workers that join
    start with zero residuals. All other state is shared; it is that of worker 0, and not copied.

    `conserve="sum"` keeps the sum of the residuals. A sync adds their *mean*, so the same sum moves the model further
    with fewer workers, and less far with more. `conserve="mean"` scales the residuals by new / old number of workers,
    so that the next syncs add the same to the average.
    """
    if not states or not is_whole(workers, 1):
        raise ValueError(
            f"resize({len(states)} states, workers={workers!r}): give each old worker's state, and at least 1 worker."
        )
    if conserve not in ("sum", "mean"):
        raise ValueError(f'resize(conserve={conserve!r}): conserve must be "sum" or "mean", of the residuals.')
    for name in ("plan", "step"):
        _check_same(name, [state.get(name) for state in states])
    scale = workers / len(states) if conserve == "mean" else 1.0
    return [_resize(states, worker, workers, scale) for worker in range(workers)]


def _check_same(name: str, values: list[Any]) -> None:
    for worker, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"resize: worker {worker} was saved with {name} {value!r} and worker 0 with {values[0]!r}. "
                "Give the states of one checkpoint, one for each worker that saved it."
            )


def _resize(trees: Sequence[Any], worker: int, workers: int, scale: float) -> Any:
    """Return a new worker's copy of a tree; `trees` are those of the old workers that have it."""
    if not isinstance(trees[0], Mapping):
        return trees[0]
    mappings = [tree if isinstance(tree, Mapping) else {} for tree in trees]
    result = {}
    for key in dict.fromkeys(key for mapping in mappings for key in mapping):
        values = [mapping.get(key) for mapping in mappings]
        if key == RESIDUAL and any(isinstance(value, Mapping) for value in values):
            residuals = [value if isinstance(value, Mapping) else {} for value in values]
            names = dict.fromkeys(name for each in residuals for name in each)
            result[key] = {
                name: _share([each.get(name) for each in residuals], worker, workers, scale) for name in names
            }
        else:
            result[key] = _resize([value for value in values if value is not None] or [None], worker, workers, scale)
    return result


def _share(residuals: Sequence[Tensor | None], worker: int, workers: int, scale: float) -> Tensor:
    """Return a new worker's residual of one parameter. A missing residual counts as zero."""
    like = next(each for each in residuals if each is not None)
    stay = min(len(residuals), workers)
    share = torch.zeros_like(like, dtype=torch.float64)
    if worker < stay:
        for leaver in residuals[stay:]:
            if leaver is not None:
                share += leaver.to(share)
        share /= stay
        own = residuals[worker]
        if own is not None:
            share += own.to(share)
    return (share * scale).to(like.dtype)
