"""Turn the states of a number of workers into those of another number, without losing or duplicating residuals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from laconic.values import is_whole

RESIDUAL = "residual"
OWN = ("counted", "kept", "in_flight", "step", "since", "rounds")
"""What else belongs to one worker: what it has counted with `session.weigh`, the states of `session.keep`, its weights
when it sent the fragments that are in flight, and the steps that it took, where rounds end by the clock."""


def resize(
    states: Sequence[Mapping[str, Any]], workers: int, *, conserve: Literal["sum", "mean"] = "sum"
) -> list[dict[str, Any]]:
    """Turn the `session.state_dict()` of each old worker into those of `workers` workers.

    >>> old = [{"state": {"gradient": {"residual": {"w": torch.tensor([x])}}}} for x in (1.0, 2.0, 4.0)]
    >>> [state["state"]["gradient"]["residual"]["w"].item() for state in resize(old, workers=2)]
    [3.0, 4.0]

    Workers that stay keep their residuals, and get an equal share of those of the workers that leave. Workers that join
    start with zero residuals. What a worker has counted, what it has in flight and the states of `session.keep` stay
    its own, too; workers that join get those of worker 0, whose model and optimizer they must load. All other state is
    shared; it is that of worker 0, and not copied.

    `conserve="sum"` keeps the sum of the residuals. A sync adds their *mean*, so the same sum moves the model further
    with fewer workers. `conserve="mean"` scales the residuals by new / old number of workers to correct that.
    """
    call = f"resize({len(states)} states, workers={workers!r}, conserve={conserve!r})"
    if not states or not is_whole(workers) or conserve not in ("sum", "mean"):
        raise ValueError(f'{call}: give each old worker\'s state, at least 1 worker, and conserve="sum" or "mean".')
    for worker, state in enumerate(states):
        for (name, first), here in zip(_place(states[0]).items(), _place(state).values(), strict=True):
            if here != first:
                raise ValueError(
                    f"{call}: worker {worker} was saved with {name} {here!r} and worker 0 with {first!r}. Give the "
                    "states of one checkpoint, one for each worker that saved it."
                )
    scale = workers / len(states) if conserve == "mean" else 1.0
    made: list[dict[str, Any]] = [
        _resize(states, (), partial(_share, worker, workers, scale)) for worker in range(workers)
    ]
    for state, own in zip(made, states, strict=False):
        state |= {name: own[name] for name in OWN if name in own}
    return made


def _place(state: Mapping[str, Any]) -> dict[str, object]:
    """Return what the states of all workers have alike: where rounds end by the clock, not the step."""
    rounds = state.get("rounds")
    at = {"step": state.get("step")} if rounds is None else {"round": rounds["ended"]}
    return {"plan": state.get("plan"), **at}


def without_residuals(state: Any) -> Any:
    """Remove the residuals of error feedback, which belong to one worker."""
    if not isinstance(state, Mapping):
        return state
    return {key: without_residuals(value) for key, value in state.items() if key != RESIDUAL}


def _resize(trees: Sequence[Any], path: tuple[Any, ...], share: Callable[[Sequence[Any]], Tensor]) -> Any:
    """Return a new worker's copy of a tree; `trees` are those of the old workers, None where one has none."""
    if any(isinstance(tree, Mapping) for tree in trees):
        mappings = [tree if isinstance(tree, Mapping) else {} for tree in trees]
        keys = dict.fromkeys(key for mapping in mappings for key in mapping)
        return {key: _resize([each.get(key) for each in mappings], (*path, key), share) for key in keys}
    if path[-2:-1] == (RESIDUAL,):  # by parameter; a parameter may be named "residual", too
        return share(trees)
    return next((tree for tree in trees if tree is not None), None)


def _share(worker: int, workers: int, scale: float, residuals: Sequence[Tensor | None]) -> Tensor:
    """Return a new worker's residual of one parameter. A missing residual counts as zero."""
    like = next(each for each in residuals if each is not None)
    zero = torch.zeros_like(like, dtype=torch.float64)
    all_old = [zero if each is None else each.to(zero) for each in residuals]
    stay = min(len(residuals), workers)
    share = all_old[worker] + sum(all_old[stay:], start=zero) / stay if worker < stay else zero
    return (share * scale).to(like.dtype)
