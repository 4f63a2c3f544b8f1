"""Convert the memory of torch's PowerSGD hook, which is keyed by bucket, to laconic's, which is keyed by parameter."""

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.torch_state import PickledState
from laconic.codecs import LowRank
from laconic.codecs.contract import wide_dtype

logger = logging.getLogger(__name__)


class Conversion:
    """Assigns the memory of a pickled state to parameters, once DDP has the bucket layout that it had when saving."""

    def __init__(self, pickled: PickledState) -> None:
        self.pickled = pickled
        self._buckets: list[dict[str, Tensor]] = []
        self._backwards = 0

    def fit(self, tensors: Mapping[str, Tensor], last: bool, state: Any) -> bool:
        """Add one bucket. After the last bucket of the second backward, convert or drop the memory and return True."""
        self._buckets.append(dict(tensors))
        if not last:
            return False
        buckets, self._buckets = self._buckets, []
        self._backwards += 1
        if self._backwards < 2:  # DDP rebuilds its buckets after the first backward, as it did before saving
            return False
        low_rank = LowRank(state.matrix_approximation_rank, state.min_compression_rate)
        if self._matches(buckets, low_rank):
            for index, bucket in enumerate(buckets):
                self._take(index, bucket, low_rank, state)
            return True
        logger.warning(
            "PowerSGD: residuals and factors saved by torch fit other buckets (%s, of %s elements) than this model's "
            "(%s, of %s elements), and are dropped. Use the same model and bucket_cap_mb as when they were saved.",
            len(self.pickled.error_dict) or len(self.pickled.q_memory_dict),
            [t.numel() for t in (self.pickled.error_dict or self.pickled.q_memory_dict).values()],
            len(buckets),
            [sum(t.numel() for t in bucket.values()) for bucket in buckets],
        )
        return True

    def _matches(self, buckets: list[dict[str, Tensor]], low_rank: LowRank) -> bool:
        saved = self.pickled
        if not saved.error_dict and not saved.q_memory_dict:
            return True  # nothing to convert
        for index, bucket in enumerate(buckets):
            sizes = _factor_sizes(bucket, low_rank)
            if saved.use_error_feedback and _numel(saved.error_dict, index) != sum(t.numel() for t in bucket.values()):
                return False
            if saved.warm_start and (
                _numel(saved.p_memory_dict, index) != sum(rows * rank for rows, _, rank in sizes.values())
                or _numel(saved.q_memory_dict, index) != sum(columns * rank for _, columns, rank in sizes.values())
            ):
                return False
        return True

    def _take(self, index: int, bucket: dict[str, Tensor], low_rank: LowRank, state: Any) -> None:
        saved = self.pickled
        sizes = _factor_sizes(bucket, low_rank)
        matrices = [name for name in sizes if low_rank.accepts(bucket[name].shape)]
        if saved.warm_start and index in saved.q_memory_dict:
            p_sizes = {name: (rows, rank) for name, (rows, _, rank) in sizes.items()}
            q_sizes = {name: (columns, rank) for name, (_, columns, rank) in sizes.items()}
            for ours, theirs, cuts in (
                (state.p_memory_dict, saved.p_memory_dict, p_sizes),
                (state.q_memory_dict, saved.q_memory_dict, q_sizes),
            ):
                pieces = _cut(theirs[index], cuts, bucket)
                ours.update({name: piece for name, piece in pieces.items() if name in matrices})
        if saved.use_error_feedback and index in saved.error_dict:
            residuals = _cut(saved.error_dict[index], {name: t.shape for name, t in bucket.items()}, bucket)
            # With feedback="own", tensors that are not compressed have no residual. torch's residuals of these sum to
            # zero over the workers.
            kept = residuals if state.feedback == "mean" else {name: residuals[name] for name in matrices}
            state.error_dict.update(kept)


def torch_factors(low_rank: LowRank, t: Tensor) -> bool:
    """Whether torch makes factors for `t`: for matrices, and below a rate of 1 also for vectors, as one column.

    laconic does not compress vectors, but must draw torch's random numbers for them to get the same ones for the
    matrices that follow.
    """
    return t.dim() > 0 and low_rank.accepts(torch.Size([t.shape[0], t.shape[1:].numel()]))


def _factor_sizes(bucket: Mapping[str, Tensor], low_rank: LowRank) -> dict[str, tuple[int, int, int]]:
    """Rows, columns and rank of each matrix, grouped by shape: the order of the factors in torch's flat tensor."""
    shapes = {n: (t.shape[0], t.shape[1:].numel()) for n, t in bucket.items() if torch_factors(low_rank, t)}
    return {
        name: (*shape, min(low_rank.rank, *shape))
        for shape in dict.fromkeys(shapes.values())
        for name in shapes
        if shapes[name] == shape
    }


def _cut(flat: Tensor, sizes: Mapping[str, tuple[int, ...]], bucket: Mapping[str, Tensor]) -> dict[str, Tensor]:
    cut, offset = {}, 0
    for name, size in sizes.items():
        numel = 1
        for side in size:
            numel *= side
        piece = flat.reshape(-1)[offset : offset + numel].view(size)
        cut[name] = piece.to(device=bucket[name].device, dtype=wide_dtype(piece.dtype), copy=True)
        offset += numel
    return cut


def _numel(tensors: Mapping[int, Tensor], index: int) -> int:
    return tensors[index].numel() if index in tensors else -1
