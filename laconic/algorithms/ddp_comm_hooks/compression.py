"""PowerSGD's hook state as one of laconic's codecs, with the state's own dictionaries as the codec's state."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from laconic.checks.agreement import agree, parameter_facts
from laconic.codecs import Batched, ByShape, Codec, ErrorFeedback, LowRank
from laconic.codecs.batched import name_of, side_of
from laconic.codecs.contract import wide_dtype
from laconic.exchange import Averaged, Exchange, State

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

    from laconic.algorithms.ddp_comm_hooks.engine import Engine
    from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

logger = logging.getLogger(__name__)

SETTINGS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start"),
    *("orthogonalization_epsilon", "compression_stats_logging_frequency", "batch_tensors_with_same_shape"),
)


def compressed(state: PowerSGDState, tensors: Mapping[str, Tensor], batched: bool) -> Exchange[Averaged]:
    """Return the exchange of one bucket, with the dictionaries of `state` as the codec's state."""
    low_rank = _low_rank_of(state, batched)
    codec = _codec_of(state, low_rank, batched)
    factors = {"p": state.p_memory_dict, "q": state.q_memory_dict} if state.warm_start else {"p": {}, "q": {}}
    _draw(state, low_rank, tensors, factors["q"], batched)
    peers = state._get_engine(state.process_group).queue.peers
    return codec.average(tensors, _state_tree(state, codec, factors), peers, reuse=True)


def _low_rank_of(state: PowerSGDState, batched: bool) -> LowRank:
    return LowRank(state.matrix_approximation_rank, 0 if batched else state.min_compression_rate)


def _codec_of(state: PowerSGDState, low_rank: LowRank, batched: bool) -> Codec:
    if state.use_error_feedback and state.feedback == "own" and not batched:
        return ByShape(ErrorFeedback(low_rank))  # uncompressed tensors have no residual
    codec: Codec = Batched(low_rank) if batched else ByShape(low_rank)
    return ErrorFeedback(codec, subtract=state.feedback) if state.use_error_feedback else codec


def _state_tree(state: PowerSGDState, codec: Codec, factors: State) -> State:
    """Return the codec's state. It is the same object in every step, because fused kernels cache tables in it."""
    engine = state._get_engine(state.process_group)
    key = (codec, id(state.error_dict), id(factors["p"]), id(factors["q"]))
    if engine.state_tree_key != key:
        engine.state_tree, engine.state_tree_key = _new_tree(codec, state.error_dict, factors), key
    return engine.state_tree


def _new_tree(codec: Codec, residual: dict[str, Tensor], factors: State) -> State:
    """Arrange residuals and factors as `codec` expects its state."""
    if isinstance(codec, ErrorFeedback):
        return {"residual": residual, "inner": _new_tree(codec.codec, residual, factors)}
    if isinstance(codec, ByShape):
        return {"codec": _new_tree(codec.codec, residual, factors)}
    return factors  # LowRank, or Batched, which passes its state on


def _draw(
    state: PowerSGDState, low_rank: LowRank, tensors: Mapping[str, Tensor], q: dict[str, Tensor], batched: bool
) -> None:
    """Add the first factors where there are none, from the random numbers that torch would draw."""
    like = next(iter(tensors.values()))
    side = _side(tensors)
    groups = ({(side, side): [name_of(tensors)]} if side else {}) if batched else factor_groups(tensors, low_rank)
    names = [name for group in groups.values() for name in group]
    first = state.iter == state.start_powerSGD_iter
    if state.warm_start and all(name in q for name in names) and (names or not first):
        return
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    for shape, group in groups.items():
        counts = [len(group)] if state.batch_tensors_with_same_shape else [1] * len(group)
        size, dtype = (shape[1], min(low_rank.rank, *shape)), wide_dtype(like.dtype)
        drawn = torch.cat([torch.randn(count, *size, generator=generator, dtype=dtype) for count in counts])
        q.update({name: x.to(like.device, copy=True) for name, x in zip(group, drawn, strict=True) if name not in q})


def factor_groups(tensors: Mapping[str, Tensor], low_rank: LowRank) -> dict[tuple[int, int], list[str]]:
    """Return the names of the tensors that torch makes factors for, by matrix shape, in torch's order.

    With a rate below 1, vectors are among them: laconic does not compress them, but must draw the same random numbers.
    """
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, t in tensors.items():
        if t.dim() > 0 and low_rank.accepts(torch.Size(_matrix_shape(t))):
            groups[_matrix_shape(t)].append(name)
    return groups


def count(state: PowerSGDState, bucket: GradBucket, tensors: Mapping[str, Tensor], batched: bool) -> None:
    """Update the compression statistics, which count elements as torch's do. The ledger counts bytes."""
    low_rank = _low_rank_of(state, batched)
    state.total_numel_before_compression += sum(t.numel() for t in tensors.values())
    if batched:
        side = _side(tensors)
        state.total_numel_after_compression += 2 * side * min(low_rank.rank, side)
    for t in () if batched else tensors.values():
        rows, columns = _matrix_shape(t) if low_rank.accepts(t.shape) else (0, 0)
        rank = min(low_rank.rank, rows, columns)
        state.total_numel_after_compression += rank * (rows + columns) or t.numel()
    if bucket.is_last() and state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        logger.info("PowerSGD at iteration %s: %s elements became %s, rate %s", state.iter, before, after, rate)
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency


def _matrix_shape(t: Tensor) -> tuple[int, int]:
    return t.shape[0], t.shape[1:].numel()


def _side(tensors: Mapping[str, Tensor]) -> int:
    return side_of(sum(t.numel() for t in tensors.values()))


def agree_at_first(
    state: PowerSGDState, engine: Engine, bucket: GradBucket, tensors: Mapping[str, Tensor], batched: bool
) -> None:
    """Check in each bucket of the first backward that all workers have the same settings and parameters."""
    facts: dict[str, object] = {}
    if bucket.index() == 0:
        facts = {slot: getattr(state, slot) for slot in (*SETTINGS, "iter", "feedback")}
        facts["hook"] = "batched_powerSGD_hook" if batched else "powerSGD_hook"
        keys = tuple(state.rng.get_state(legacy=True))[1]
        facts["random_seed (the random state it makes)"] = int(np.asarray(keys).sum())
    agree(engine.queue, "PowerSGD", facts | parameter_facts(tensors.items()))
