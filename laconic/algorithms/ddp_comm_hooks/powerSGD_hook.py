"""PowerSGD as a DDP communication hook. The twin of torch's module of this name.

Differences from torch: the residual is the error of *this* worker's own factors, not its distance from the mean, so it
stays bounded. Every worker starts its collectives in the same order. Zero, rank-deficient, tiny and huge gradients stay
finite. A step with NaN or Inf does not change the state. State is keyed by parameter, not by bucket, and resuming is
bit-exact. Factors and residuals are fp32 for fp16 and bf16 gradients. Settings, parameters and seeds that differ
between workers raise an error at the first step.
"""

import logging
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.compression import SETTINGS, agree_at_first, compressed, count
from laconic.algorithms.ddp_comm_hooks.engine import HookState
from laconic.algorithms.ddp_comm_hooks.torch_state import Conversion, PickledState
from laconic.codecs import ErrorFeedback, Exact, LowRank
from laconic.exchange import Averaged, Exchange
from laconic.ledger import Ledger
from laconic.session.bucket_queue import as_laid_out

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)


class PowerSGDState(HookState):
    """Settings and memory of PowerSGD for one DDP model.

    Args:
        process_group: The workers that average; None for all.
        matrix_approximation_rank: The rank of the factors. Start with 1, and double it while quality improves.
        start_powerSGD_iter: Iterations before compression starts; a tenth of the training is a good choice.
        min_compression_rate: A matrix with a lower compression rate is sent uncompressed.
        use_error_feedback: Whether the compression error of a step is added to the next gradient. Keep it on.
        warm_start: Whether a step starts from the factors of the previous step. Keep it on.
        orthogonalization_epsilon: Accepted for compatibility and not needed: factors are always orthonormal.
        random_seed: The seed of the first factors, the same on every worker.
        compression_stats_logging_frequency: Iterations between log lines of the compression statistics.
        batch_tensors_with_same_shape: How the first factors are drawn; equal shapes are batched in any case.
        feedback: "own" subtracts this worker's own product of factors, as the paper does; "mean" subtracts the mean
            over the workers, as torch does: the residual then grows while workers see different data.

    `error_dict`, `p_memory_dict` and `q_memory_dict` hold a tensor for each parameter, keyed by its index counted from
    the end of the model: `state.error_dict["parameter[-1]"]`.

    >>> state = PowerSGDState(process_group=None, matrix_approximation_rank=4, start_powerSGD_iter=100)
    >>> ddp_model.register_comm_hook(state, powerSGD_hook)  # doctest: +SKIP
    """

    __slots__ = [
        *("process_group", "matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
        *("orthogonalization_epsilon", "use_error_feedback", "warm_start", "batch_tensors_with_same_shape", "rng"),
        *("error_dict", "p_memory_dict", "q_memory_dict", "iter", "total_numel_before_compression"),
        *("total_numel_after_compression", "compression_stats_logging_frequency", "next_stats_report"),
    ]

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        *,
        feedback: Literal["own", "mean"] = "own",
    ) -> None:
        if (use_error_feedback or warm_start) and start_powerSGD_iter <= 1:
            raise ValueError(  # torch's text: programs and tests match it
                "Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled, "
                "because PowerSGD can only be applied after the first two iterations in DDP."
            )
        LowRank(matrix_approximation_rank, min_compression_rate)  # raises for invalid values
        ErrorFeedback(Exact(), subtract=feedback)
        self.process_group = process_group
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.rng = np.random.RandomState(random_seed)
        self.error_dict: dict[str, Tensor] = {}
        self.p_memory_dict: dict[str, Tensor] = {}
        self.q_memory_dict: dict[str, Tensor] = {}
        self.iter = self.next_stats_report = 0
        self.total_numel_before_compression = self.total_numel_after_compression = 0
        self.compression_stats_logging_frequency = max(1, compression_stats_logging_frequency)
        self.feedback = feedback
        self._converted: Conversion | None = None
        self._reset({})
        logger.info("PowerSGD: %s", {slot: getattr(self, slot) for slot in SETTINGS})

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the process group, which cannot be pickled. `state_dict` needs no pickle."""
        logger.warning("NOTE: Process group is not serializable and excluded from a saved state.")
        kept = {slot: getattr(self, slot) for slot in self.__slots__ if slot != "process_group"}
        return {**kept, "feedback": self.feedback, "_saved_layout": self._layout()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state, with the default process group."""
        logger.warning(  # torch's text, spaces included: programs and tests match it
            "NOTE: Process group will be set to a default group (i.e. the world size).\
                If a different group is desired, please set `self.process_group` after PowerSGD state is loaded."
        )
        self.process_group = dist.group.WORLD
        self.feedback, self._converted = "own", None
        self._reset({})
        for name, value in state.items():
            setattr(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PowerSGDState":
        """Copy settings and memory; the process group is shared."""
        copy = PowerSGDState.__new__(PowerSGDState)
        copy.process_group, copy._converted, copy.rng = self.process_group, self._converted, np.random.RandomState()
        copy.load_state_dict(self.state_dict(), _strict=False)
        return copy

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values. Each worker must save its own: residuals differ."""
        _, keys, position, has_gauss, gauss = self.rng.get_state(legacy=True)
        numbers = {"position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}
        rng = {"keys": torch.from_numpy(np.asarray(keys).astype(np.int64)), **numbers}
        memory = {slot: {n: t.clone() for n, t in getattr(self, slot).items()} for slot in _MEMORY}
        counts = {slot: getattr(self, slot) for slot in (*SETTINGS, *_COUNTERS)}
        return {**counts, **memory, "feedback": self.feedback, "rng": rng, "layout": self._layout()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, _strict: bool = True) -> None:
        """Restore a `state_dict`. The settings that decide the shapes of the memory must be the same."""
        for slot in _SHAPING if _strict else ():
            if state_dict[slot] != getattr(self, slot):
                raise ValueError(
                    f"this PowerSGD state was saved with {slot}={state_dict[slot]} and the state that loads it has "
                    f"{slot}={getattr(self, slot)}. Make the state with the saved value, or start without its memory."
                )
        for slot in (*SETTINGS, *_COUNTERS):
            setattr(self, slot, state_dict[slot])
        for slot in _MEMORY:
            setattr(self, slot, {name: t.clone() for name, t in state_dict[slot].items()})
        self.feedback = state_dict["feedback"]
        keys, position, has_gauss, gauss = (state_dict["rng"][x] for x in ("keys", "position", "has_gauss", "gauss"))
        self.rng.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        self._reset({}, state_dict["layout"])

    @classmethod
    def from_torch(
        cls,
        pickled: PickledState,
        process_group: dist.ProcessGroup | None = None,
        feedback: Literal["own", "mean"] = "own",
    ) -> "PowerSGDState":
        """Convert a state that torch's `PowerSGDState` saved, as `torch_state.read_power_sgd_state` returns it.

        The memory is converted at the end of the second backward, when DDP has rebuilt its buckets; these two backward
        passes average exactly. If the sizes of the buckets are others than when saving, it is dropped with a warning.
        """
        state = cls(process_group, feedback=feedback, **{slot: getattr(pickled, slot) for slot in SETTINGS})
        for slot in _COUNTERS:
            setattr(state, slot, getattr(pickled, slot))
        state.rng.set_state(pickled.rng)
        state._converted = Conversion(pickled)
        return state

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count an iteration at its last bucket."""
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD compresses from now on, after %s iterations.", self.iter)

    def compression_stats(self) -> tuple[float, int, int]:
        """Return the compression rate so far, and the numbers of elements before and after compression.

        >>> PowerSGDState(process_group=None).compression_stats()
        (0, 0, 0)
        """
        before, after = self.total_numel_before_compression, self.total_numel_after_compression
        return (before / after if after > 0 else 0, before, after)

    @property
    def ledger(self) -> Ledger:
        """Bytes of every collective of this hook since the state was made or loaded. Not saved."""
        return self._get_engine(self.process_group).ledger


_SHAPING = ("matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start")
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients layer by layer, each matrix as two thin factors, in two all-reduces (arXiv:1905.13727)."""
    return _average(state, bucket, batched=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average each bucket as one square matrix: fewer operations, but a much larger error at the same rank."""
    return _average(state, bucket, batched=True)


def _average(state: PowerSGDState, bucket: GradBucket, batched: bool) -> Future[Tensor]:
    engine = state._get_engine(state.process_group)
    tensors = state._names.gradients(bucket)
    if engine.first_backward:
        agree_at_first(state, engine, bucket, tensors, batched)
    plain = state.iter < state.start_powerSGD_iter
    if not plain and state._converted is not None:
        plain = True  # torch's memory is not converted yet
        if state._converted.fit(tensors, bucket.is_last(), state):
            state._converted = None
    if not plain:
        count(state, bucket, tensors, batched)
        tensors = {n: as_laid_out(g, p) for (n, g), p in zip(tensors.items(), bucket.parameters(), strict=True)}

    def begin(some: Mapping[str, Tensor]) -> Exchange[Averaged]:
        if plain:
            return Exact().average(some, {}, engine.queue.peers, reuse=True)
        return compressed(state, some, batched)

    future = engine.average(tensors, bucket, begin)
    engine.first_backward = engine.first_backward and not bucket.is_last()
    state.maybe_increase_iter(bucket)
    return future
