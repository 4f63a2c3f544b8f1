"""The states of a world that has changed its size: what is owed must not be lost, nor paid twice.

Residuals are each worker's own; everything else in `talk.state_dict()` is shared. When workers leave, what they owed is
spread evenly over those that stay; workers that join owe nothing. So the sum of what is owed is conserved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

RESIDUAL = "residual"


def resize(
    states: Sequence[Mapping[str, Any]], workers: int, *, conserve: Literal["sum", "mean"] = "sum"
) -> list[dict[str, Any]]:
    """Turn the `talk.state_dict()` of each worker of one world into those of a world of another size.

    >>> owed = [{"state": {"gradient": {"residual": {"w": torch.tensor([x])}}}} for x in (1.0, 2.0, 4.0)]
    >>> [state["state"]["gradient"]["residual"]["w"].item() for state in resize(owed, workers=2)]
    [3.0, 4.0]
    >>> [state["state"]["gradient"]["residual"]["w"].item() for state in resize(owed, workers=4)]
    [1.0, 2.0, 4.0, 0.0]

    Workers that stay keep their residuals, and get an even share of those of workers that leave. Shared state is that
    of worker 0, and not copied: `load_state_dict` does.

    `conserve="sum"` keeps the sum of the residuals. A round delivers their *mean*, so the same sum moves the model
    further in a smaller world, and less far in a larger one. `conserve="mean"` scales all by new / old size, so that
    the next rounds add to the averages what they would have added in the old world.
    """
    if not states or type(workers) is not int or workers < 1:
        raise ValueError(
            f"resize({len(states)} states, workers={workers!r}): give the state of each old worker, and at least 1."
        )
    if conserve not in ("sum", "mean"):
        raise ValueError(
            f'resize(conserve={conserve!r}): what is conserved is the "sum" of the residuals or their "mean".'
        )
    for name in ("plan", "step"):
        _check_same(name, [state.get(name) for state in states])
    scale = workers / len(states) if conserve == "mean" else 1.0
    return [_resized(states, worker, workers, scale) for worker in range(workers)]


def _check_same(name: str, values: list[Any]) -> None:
    for worker, value in enumerate(values):
        if value != values[0]:
            raise ValueError(
                f"resize: worker {worker} was saved with {name} {value!r} and worker 0 with {values[0]!r}. "
                "Give the states of one generation, one for each worker that saved it."
            )


def _resized(nests: Sequence[Any], worker: int, workers: int, scale: float) -> Any:
    """One new worker's copy of a nest; `nests` are the old workers'."""
    first = nests[0]
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for nest in nests if isinstance(nest, Mapping) for key in nest)
        return {key: _entry(key, nests, worker, workers, scale) for key in keys}
    if isinstance(first, Tensor):
        return first
    if isinstance(first, list | tuple):
        return type(first)(_resized([each], worker, workers, scale) for each in first)
    return first


def _entry(key: Any, nests: Sequence[Any], worker: int, workers: int, scale: float) -> Any:
    below = [nest[key] if isinstance(nest, Mapping) and key in nest else None for nest in nests]
    if key == RESIDUAL and any(isinstance(each, Mapping) for each in below):
        owed = [each if isinstance(each, Mapping) else {} for each in below]
        names = dict.fromkeys(name for each in owed for name in each)
        return {name: _share([each.get(name) for each in owed], worker, workers, scale) for name in names}
    return _resized([each for each in below if each is not None] or [None], worker, workers, scale)


def _share(owed: Sequence[Tensor | None], worker: int, workers: int, scale: float) -> Tensor:
    """What a new worker owes of one parameter. A worker that has no residual of it owes nothing."""
    like = next(each for each in owed if each is not None)
    stay = min(len(owed), workers)
    share = torch.zeros_like(like, dtype=torch.float64)
    if worker < stay:
        for leaver in owed[stay:]:
            if leaver is not None:
                share += leaver.to(share)
        share /= stay
        mine = owed[worker]
        if mine is not None:
            share += mine.to(share)
    return (share * scale).to(like.dtype)
