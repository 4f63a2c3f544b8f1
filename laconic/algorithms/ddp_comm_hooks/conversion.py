"""torch's PowerSGD memory, which belongs to buckets, made ours, which belongs to parameters."""

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from laconic.codecs import LowRank
from laconic.codecs.codec import wide_dtype
from laconic.torch_pickle import PickledState

logger = logging.getLogger(__name__)


class Conversion:
    """Fits the memory of a pickled state to DDP's buckets, once they have the sizes that it was saved with."""

    def __init__(self, pickled: PickledState) -> None:
        self.pickled = pickled
        self._buckets: list[dict[str, Tensor]] = []
        self._backwards = 0

    def fit(self, tensors: Mapping[str, Tensor], last: bool, state: Any) -> bool:
        """Look at one more bucket; at the last of a backward, take the memory over. Return whether it is settled."""
        self._buckets.append(dict(tensors))
        if not last:
            return False
        buckets, self._buckets = self._buckets, []
        self._backwards += 1
        low_rank = LowRank(state.matrix_approximation_rank, state.min_compression_rate)
        if self._matches(buckets, low_rank):
            for index, bucket in enumerate(buckets):
                self._take(index, bucket, low_rank, state)
            return True
        if self._backwards < 2:  # DDP lays its buckets out anew after the first backward
            return False
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
            return True  # nothing to take over
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
        if saved.warm_start and index in saved.q_memory_dict:
            p_sizes = {name: (rows, rank) for name, (rows, _, rank) in sizes.items()}
            q_sizes = {name: (columns, rank) for name, (_, columns, rank) in sizes.items()}
            state.p_memory_dict.update(_cut(saved.p_memory_dict[index], p_sizes, bucket))
            state.q_memory_dict.update(_cut(saved.q_memory_dict[index], q_sizes, bucket))
        if saved.use_error_feedback and index in saved.error_dict:
            residuals = _cut(saved.error_dict[index], {name: t.shape for name, t in bucket.items()}, bucket)
            # Under our rule tensors that travel exactly owe nothing: what torch collected there sums to zero.
            kept = residuals if state.feedback == "mean" else {name: residuals[name] for name in sizes}
            state.error_dict.update(kept)


def _factor_sizes(bucket: Mapping[str, Tensor], low_rank: LowRank) -> dict[str, tuple[int, int, int]]:
    """Rows, columns and rank of each matrix, by groups of one shape: the order in which torch lays factors out."""
    shapes = {n: (t.shape[0], t.shape[1:].numel()) for n, t in bucket.items() if low_rank.accepts(t.shape)}
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
