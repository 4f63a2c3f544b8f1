"""`ErrorFeedback(LowRank)` on CUDA as an exchange, with what `ByShape` sends beside it.

What depends only on shapes and addresses is made once for each bucket (`group.py`) and kept in the state, under names
that are never saved. Factors in the state are views of the group's.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from laconic.comm.requests import Averaged, Exchange, Mean, Request, State, Tensors
from laconic.kernels.choose import own_is_owed
from laconic.kernels.cuda.launches import Sequence
from laconic.kernels.cuda.matrices import Group

if TYPE_CHECKING:
    from laconic.codecs.low_rank import LowRank


@dataclass(frozen=True, eq=False)
class Bound:
    """A group, the very tensors that it is aimed at, and where it keeps what it remembers."""

    group: Group
    tensors: Tensors
    values: list[Tensor]
    residual: dict[str, Tensor]
    residuals: list[Tensor]
    state: State

    def still(self, codec: LowRank, tensors: Tensors) -> bool:
        """Tell whether nothing is different from last time, so that nothing need be looked at."""
        return (
            self.group.codec == codec
            and all(map(is_, tensors.values(), self.values))
            and all(map(is_, map(self.residual.get, self.group.names), self.residuals))
        )

    def exchange(self) -> Exchange:
        """Average the tensors in place; the residual is what this worker still owes."""
        if self.group.codec.rounds == "two":
            yield from _two_rounds(self.group)
        else:
            yield from _one_factor(self.group, self.state.setdefault("turn", {}))
        good, mean = self.group.good, self.tensors
        return Averaged(mean if isinstance(mean, dict) else dict(mean), own_is_owed, lambda: good.bool())


def fused_feedback(codec: LowRank, tensors: Tensors, residual: dict[str, Tensor], state: State) -> Exchange:
    """Average `tensors` in place through `codec` with error feedback; the residual is what this worker still owes."""
    return bind(codec, tensors, {}, tensors, residual, state).exchange()


def bind(
    codec: LowRank, matrices: Tensors, rest: Tensors, whole: Tensors, residual: dict[str, Tensor], state: State
) -> Bound:
    """Aim a group, the one of last time if there is one, at these tensors."""
    group = _group(codec, matrices, rest, residual, state)
    group.aim(matrices, residual, rest)
    return Bound(group, whole, list(whole.values()), residual, [residual[name] for name in matrices], state)


def _two_rounds(group: Group) -> Generator[Request, Tensor, None]:
    group.run("first p")
    _take(group.p_message, (yield Mean(group.p_message)))
    group.run("between")
    _take(group.q_message, (yield Mean(group.q_message)))
    group.run("last q")


def _one_factor(group: Group, turns: dict[str, int]) -> Generator[Request, Tensor, None]:
    turn = turns.get(group.names[0], 0)
    side, message = ("q", group.q_message) if turn % 2 else ("p", group.p_message)
    group.run(f"first {side}")
    _take(message, (yield Mean(message)))
    group.run(f"last {side}")
    turns.update(dict.fromkeys(group.names, turn + 1))


def _take(message: Tensor, answer: Tensor) -> None:
    """Bring the answer to where the launches expect it: most wires answer in the memory of the question."""
    if answer.data_ptr() != message.data_ptr():
        message.copy_(answer.view(-1))


def _group(codec: LowRank, matrices: Tensors, rest: Tensors, residual: dict[str, Tensor], state: State) -> Group:
    groups: dict[tuple[str, ...], Group] = state.setdefault("_fused", {})
    key = tuple(matrices)
    group = groups.get(key)
    known_p, known_q = state.setdefault("p", {}), state.setdefault("q", {})
    some = next(iter(matrices.values()))
    if (
        group is None
        or (group.codec, group.dtype, group.device) != (codec, some.dtype, some.device)
        or group.rest_names != list(rest)
        or not all(map(is_, map(known_q.get, key), group.q_views))
        or not all(map(is_, map(known_p.get, key), group.p_views))
    ):
        for other in [k for k in groups if set(k) & set(key)]:
            del groups[other]  # an older layout of the same matrices
        group = groups[key] = Group(codec, matrices, rest)
        _start(group, matrices, residual, state)
    return group


def _start(group: Group, matrices: Tensors, residual: dict[str, Tensor], state: State) -> None:
    """Give a new group the factors that are known, or random ones, and residuals of zeros where there are none."""
    known_p, known_q = state["p"], state["q"]
    for (name, t), p, q in zip(matrices.items(), group.p_views, group.q_views, strict=True):
        if name not in residual:
            residual[name] = torch.zeros(t.shape, dtype=torch.float32, device=t.device)
        q.copy_(group.codec.start(name, t.shape, state, t))
        if name in known_p:
            p.copy_(known_p[name])
    Sequence(group.orthonormal_q(group.q.clone(), group.q, group.always))()
    if all(name in known_p for name in group.names):
        Sequence(group.orthonormal_p(group.p.clone(), group.p, group.always))()
    known_p.update(zip(group.names, group.p_views, strict=True))
    known_q.update(zip(group.names, group.q_views, strict=True))
