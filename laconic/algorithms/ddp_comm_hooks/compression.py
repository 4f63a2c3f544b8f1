"""How a bucket travels under PowerSGD's hooks: the state's settings as one of laconic's codecs, over its own memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.conversion import torch_factors
from laconic.checks.agreement import agree, parameter_facts
from laconic.codecs import Batched, ByShape, Codec, ErrorFeedback, LowRank
from laconic.codecs.batched import name_of, side_of
from laconic.codecs.contract import wide_dtype
from laconic.comm.requests import Exchange, State

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from laconic.algorithms.ddp_comm_hooks.hooking import Engine
    from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

logger = logging.getLogger(__name__)

SETTINGS = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "compression_stats_logging_frequency",
    "batch_tensors_with_same_shape",
)


def compressed(state: PowerSGDState, tensors: Mapping[str, Tensor], batched: bool) -> Exchange:
    """Begin the exchange of one bucket, over the state's own dictionaries."""
    low_rank = low_rank_of(state, batched)
    memory, nest = _memory(state, batched)
    _draw(state, low_rank, tensors, memory["q"], batched)
    codec: Codec = Batched(low_rank) if batched else ByShape(low_rank)
    if _owes_by_matrix(state, batched):
        codec = ByShape(ErrorFeedback(low_rank))  # what travels exactly owes nothing
    elif state.use_error_feedback:
        codec = ErrorFeedback(codec, subtract=state.feedback)
    return codec.average(tensors, nest, reuse=True)


def _memory(state: PowerSGDState, batched: bool) -> tuple[State, State]:
    """Return the state's dictionaries as LowRank takes them, and as the whole codec does.

    The same nest serves as long as the dictionaries do: fused paths keep their tables in it.
    """
    engine = state._linked()
    made_of = (batched, state.feedback, state.p_memory_dict, state.q_memory_dict, state.error_dict)
    same = engine.nest is not None and all(a is b for a, b in zip(engine.nest_made_of, made_of, strict=True))
    if not same or not state.warm_start:
        engine.nest_made_of = made_of
        warm = {"p": state.p_memory_dict, "q": state.q_memory_dict}
        memory: State = warm if state.warm_start else {"p": {}, "q": {}}
        nest: State = memory if batched else {"codec": memory}
        if _owes_by_matrix(state, batched):
            nest = {"codec": {"residual": state.error_dict, "inner": memory}}
        elif state.use_error_feedback:
            nest = {"residual": state.error_dict, "inner": nest}
        engine.nest = (memory, nest)
    assert engine.nest is not None
    return engine.nest


def _owes_by_matrix(state: PowerSGDState, batched: bool) -> bool:
    return state.use_error_feedback and state.feedback == "own" and not batched


def low_rank_of(state: PowerSGDState, batched: bool = False) -> LowRank:
    """Return the engine's codec for the settings of `state`."""
    return LowRank(state.matrix_approximation_rank, 0 if batched else state.min_compression_rate)


def _draw(
    state: PowerSGDState, low_rank: LowRank, tensors: Mapping[str, Tensor], q: dict[str, Tensor], batched: bool
) -> None:
    """Fill in first factors where there are none, from the numbers that torch would draw."""
    dtype = wide_dtype(next(iter(tensors.values())).dtype)
    if batched:
        side = side_of(sum(t.numel() for t in tensors.values()))
        shapes = {name_of(tensors): (side, side)} if side else {}
    else:
        shapes = {name: (t.shape[0], t.shape[1:].numel()) for name, t in tensors.items() if torch_factors(low_rank, t)}
    first = state.iter == state.start_powerSGD_iter
    if not (state.warm_start and all(name in q for name in shapes) and (shapes or not first)):
        seed = int(state.rng.randint(1_000_000_000))
        drawn = _factors(shapes, low_rank.rank, seed, dtype, state.batch_tensors_with_same_shape)
        device = next(iter(tensors.values())).device
        q.update({name: x.to(device) for name, x in drawn.items() if name not in q})


def _factors(
    shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, dtype: torch.dtype, together: bool
) -> dict[str, Tensor]:
    """Draw [columns, rank] for each matrix, by groups of one shape, in torch's order."""
    generator = torch.Generator().manual_seed(seed)
    drawn: dict[str, Tensor] = {}
    for shape in dict.fromkeys(shapes.values()):
        names = [name for name in shapes if shapes[name] == shape]
        size = (shape[1], min(rank, *shape))
        if together:
            drawn.update(zip(names, torch.randn(len(names), *size, generator=generator, dtype=dtype), strict=True))
        else:
            drawn.update({name: torch.randn(1, *size, generator=generator, dtype=dtype)[0] for name in names})
    return drawn


def count(state: PowerSGDState, bucket: GradBucket, tensors: Mapping[str, Tensor], batched: bool) -> None:
    """Keep the compression statistics, in elements, as torch does. The ledger counts bytes."""
    low_rank = low_rank_of(state, batched)
    for t in tensors.values():
        state.total_numel_before_compression += t.numel()
        if not batched:
            rows, columns = (t.shape[0], t.shape[1:].numel()) if low_rank.accepts(t.shape) else (0, 0)
            rank = min(low_rank.rank, rows, columns)
            state.total_numel_after_compression += rank * (rows + columns) or t.numel()
    if batched:
        side = side_of(sum(t.numel() for t in tensors.values()))
        state.total_numel_after_compression += 2 * side * min(low_rank.rank, side)
    if bucket.is_last() and state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        logger.info("PowerSGD at iteration %s: %s elements became %s, rate %s", state.iter, before, after, rate)
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency


def agree_at_first(
    state: PowerSGDState, engine: Engine, bucket: GradBucket, tensors: Mapping[str, Tensor], batched: bool
) -> None:
    """Make sure, bucket by bucket of the first backward, that all workers have the same settings and parameters."""
    facts: dict[str, object] = {}
    if bucket.index() == 0:
        facts = {slot: getattr(state, slot) for slot in (*SETTINGS, "iter")}
        facts["feedback"] = state.feedback
        facts["hook"] = "batched_powerSGD_hook" if batched else "powerSGD_hook"
        facts["random_seed (the random state it makes)"] = int(
            np.asarray(tuple(state.rng.get_state(legacy=True))[1]).sum()
        )
    facts |= parameter_facts(tensors.items())
    agree(engine.queue, "PowerSGD", facts)
