"""PowerSGD as a DDP communication hook. The twin of torch's module of this name.

Differences from torch: the residual is the error of *this* worker's own factors, not its distance from the mean, so it
stays bounded. Every worker starts its collectives in the same order. Zero, rank-deficient, tiny and huge gradients stay
finite. A step with NaN or Inf does not change the state. State is keyed by parameter, not by bucket, and resuming is
bit-exact. Factors and residuals are fp32 for fp16 and bf16 gradients. Settings, parameters and seeds that differ
between workers raise an error at the first step.
"""

import hashlib
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from laconic.algorithms.ddp_comm_hooks.engine import Engine, HookState
from laconic.checks.agreement import agree, parameter_facts
from laconic.codecs import ByShape, Codec, ErrorFeedback, Exact, LowRank
from laconic.codecs.contract import accept_every_shape, check_codec
from laconic.exchange import Averaged, Exchange, Peers, State, Tensors, true
from laconic.ledger import Ledger
from laconic.packing import pack, unpack, wide_dtype
from laconic.session.ddp import as_laid_out
from laconic.torch_private.distributed import GradBucket
from laconic.values import as_code

__all__ = ["PowerSGDState", "batched_powerSGD_hook", "powerSGD_hook"]

logger = logging.getLogger(__name__)

_SETTINGS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "use_error_feedback", "warm_start"),
    *("orthogonalization_epsilon", "compression_stats_logging_frequency", "batch_tensors_with_same_shape"),
)
_SHAPING = ("matrix_approximation_rank", "min_compression_rate", "use_error_feedback", "warm_start")
_COUNTERS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")
_MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")


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
        self._reset({})
        logger.info("PowerSGD: %s", {slot: getattr(self, slot) for slot in _SETTINGS})

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
        self.feedback = "own"
        self._reset({})
        for name, value in state.items():
            setattr(self, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PowerSGDState":
        """Copy settings and memory; the process group is shared."""
        copy = PowerSGDState.__new__(PowerSGDState)
        copy.process_group, copy.rng = self.process_group, np.random.RandomState()
        copy.load_state_dict(self.state_dict(), _strict=False)
        return copy

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values. Each worker must save its own: residuals differ."""
        _, keys, position, has_gauss, gauss = self.rng.get_state(legacy=True)
        numbers = {"position": int(position), "has_gauss": int(has_gauss), "gauss": float(gauss)}
        rng = {"keys": torch.from_numpy(np.asarray(keys).astype(np.int64)), **numbers}
        memory = {slot: {n: t.clone() for n, t in getattr(self, slot).items()} for slot in _MEMORY}
        counts = {slot: getattr(self, slot) for slot in (*_SETTINGS, *_COUNTERS)}
        return {**counts, **memory, "feedback": self.feedback, "rng": rng, "layout": self._layout()}

    def load_state_dict(self, state_dict: Mapping[str, Any], *, _strict: bool = True) -> None:
        """Restore a `state_dict`. The settings that decide the shapes of the memory must be the same."""
        for slot in _SHAPING if _strict else ():
            if state_dict[slot] != getattr(self, slot):
                raise ValueError(
                    f"this PowerSGD state was saved with {slot}={state_dict[slot]} and the state that loads it has "
                    f"{slot}={getattr(self, slot)}. Make the state with the saved value, or start without its memory."
                )
        for slot in (*_SETTINGS, *_COUNTERS):
            setattr(self, slot, state_dict[slot])
        for slot in _MEMORY:
            setattr(self, slot, {name: t.clone() for name, t in state_dict[slot].items()})
        self.feedback = state_dict["feedback"]
        keys, position, has_gauss, gauss = (state_dict["rng"][x] for x in ("keys", "position", "has_gauss", "gauss"))
        self.rng.set_state(("MT19937", keys.numpy().astype(np.uint32), position, has_gauss, gauss))
        self._reset({}, state_dict["layout"])

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


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average gradients layer by layer, each matrix as two thin factors, in two all-reduces (arXiv:1905.13727)."""
    return _average(state, bucket, batched=False)


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Average each bucket as one square matrix: fewer operations, but a much larger error at the same rank."""
    return _average(state, bucket, batched=True)


def _average(state: PowerSGDState, bucket: GradBucket, batched: bool) -> Future[Tensor]:
    """Average one bucket: exactly before `start_powerSGD_iter`, compressed from then on."""
    engine = state._get_engine(state.process_group)
    tensors = state._names.gradients(bucket)
    low_rank = LowRank(state.matrix_approximation_rank, 0 if batched else state.min_compression_rate)
    if engine.first_backward:  # 1. in each bucket of the first backward, workers compare settings and parameters
        _agree(state, engine, bucket, tensors, batched)

    plain = state.iter < state.start_powerSGD_iter
    if not plain:  # 2. statistics, and gradients in the layout of their parameters
        _count(state, bucket, _shapes_of(tensors, low_rank, batched))
        tensors = {n: as_laid_out(g, p) for (n, g), p in zip(tensors.items(), bucket.parameters(), strict=True)}

    def begin(some: Mapping[str, Tensor]) -> Exchange[Averaged]:
        if plain:
            return Exact().average(some, {}, engine.queue.peers, reuse=True)
        return _compressed(state, some, low_rank, batched)

    future = engine.average(tensors, bucket, begin)  # 3. `begin` runs in the order of the saved bucket layout
    engine.first_backward = engine.first_backward and not bucket.is_last()
    state.maybe_increase_iter(bucket)
    return future


def _agree(
    state: PowerSGDState, engine: Engine, bucket: GradBucket, tensors: Mapping[str, Tensor], batched: bool
) -> None:
    facts: dict[str, object] = {}
    if bucket.index() == 0:
        facts = {slot: getattr(state, slot) for slot in (*_SETTINGS, "iter", "feedback")}
        facts["hook"] = "batched_powerSGD_hook" if batched else "powerSGD_hook"
        keys = tuple(state.rng.get_state(legacy=True))[1]
        facts["random_seed (the random state it makes)"] = int(np.asarray(keys).sum())
    agree(engine.queue, "PowerSGD", facts | parameter_facts(tensors.items()))


def _compressed(
    state: PowerSGDState, tensors: Mapping[str, Tensor], low_rank: LowRank, batched: bool
) -> Exchange[Averaged]:
    """Return the exchange of one bucket, with the dictionaries of `state` as the codec's state."""
    codec: Codec
    if not state.use_error_feedback:
        codec = Batched(low_rank) if batched else ByShape(low_rank)
    elif state.feedback == "own" and not batched:
        codec = ByShape(ErrorFeedback(low_rank))  # tensors that are not compressed have no residual
    else:
        codec = ErrorFeedback(Batched(low_rank) if batched else ByShape(low_rank), subtract=state.feedback)
    factors = {"p": state.p_memory_dict, "q": state.q_memory_dict} if state.warm_start else {"p": {}, "q": {}}
    _draw(state, _shapes_of(tensors, low_rank, batched), next(iter(tensors.values())), factors["q"])

    engine = state._get_engine(state.process_group)
    key = (codec, id(state.error_dict), id(factors["p"]), id(factors["q"]))
    if engine.state_tree_key != key:  # one object for all steps: fused kernels cache tables in it
        engine.state_tree, engine.state_tree_key = _state_tree(codec, state.error_dict, factors), key
    return codec.average(tensors, engine.state_tree, engine.queue.peers, reuse=True)


def _state_tree(codec: Codec, residual: dict[str, Tensor], factors: State) -> State:
    """Arrange residuals and factors as `codec` expects its state."""
    if isinstance(codec, ErrorFeedback):
        return {"residual": residual, "inner": _state_tree(codec.codec, residual, factors)}
    if isinstance(codec, ByShape):
        return {"codec": _state_tree(codec.codec, residual, factors)}
    return factors  # LowRank, or Batched, which passes its state on


@dataclass(frozen=True)
class _Shapes:
    """What the shapes of a bucket's tensors say."""

    rank: int
    groups: Mapping[tuple[int, int], Sequence[str]]
    """The names of the tensors that torch makes factors for, by matrix shape, in torch's order.

    With a rate below 1, vectors are among them: laconic does not compress them, but must draw the same random numbers.
    """
    names: Sequence[str]
    """Of all groups."""
    numels: tuple[int, int]
    """Elements before and after compression, as torch counts them."""


def _shapes_of(tensors: Mapping[str, Tensor], low_rank: LowRank, batched: bool) -> _Shapes:
    """Look at some tensors; those of the same names and shapes were looked at in an earlier step."""
    return _look_at(tuple((name, t.shape) for name, t in tensors.items()), low_rank, batched)


@lru_cache(maxsize=4096)
def _look_at(shapes: tuple[tuple[str, torch.Size], ...], low_rank: LowRank, batched: bool) -> _Shapes:
    before = sum(shape.numel() for _, shape in shapes)
    groups: dict[tuple[int, int], list[str]] = defaultdict(list)
    if batched:  # one square matrix of all tensors
        side = _side(before)
        if side:
            groups[side, side].append(_name_of([name for name, _ in shapes]))
        after = 2 * side * min(low_rank.rank, side)
    else:
        after = 0
        for name, shape in shapes:
            rows, columns = matrix = (shape[0], shape[1:].numel()) if shape else (0, 0)
            if shape and low_rank.accepts(torch.Size(matrix)):
                groups[matrix].append(name)
            rank = min(low_rank.rank, *matrix) if low_rank.accepts(shape) else 0
            after += rank * (rows + columns) or shape.numel()
    return _Shapes(low_rank.rank, groups, [name for group in groups.values() for name in group], (before, after))


def _draw(state: PowerSGDState, shapes: _Shapes, like: Tensor, q: dict[str, Tensor]) -> None:
    """Add the first factors where there are none, from the random numbers that torch would draw."""
    first = state.iter == state.start_powerSGD_iter
    if state.warm_start and all(name in q for name in shapes.names) and (shapes.names or not first):
        return
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    for (rows, columns), group in shapes.groups.items():
        counts = [len(group)] if state.batch_tensors_with_same_shape else [1] * len(group)
        size, dtype = (columns, min(shapes.rank, rows, columns)), wide_dtype(like.dtype)
        drawn = torch.cat([torch.randn(count, *size, generator=generator, dtype=dtype) for count in counts])
        q.update({name: x.to(like.device, copy=True) for name, x in zip(group, drawn, strict=True) if name not in q})


def _count(state: PowerSGDState, bucket: GradBucket, shapes: _Shapes) -> None:
    """Update the compression statistics, which count elements as torch's do. The ledger counts bytes."""
    before, after = shapes.numels
    state.total_numel_before_compression += before
    state.total_numel_after_compression += after
    if bucket.is_last() and state.iter >= state.next_stats_report:
        rate, before, after = state.compression_stats()
        logger.info("PowerSGD at iteration %s: %s elements became %s, rate %s", state.iter, before, after, rate)
        state.next_stats_report = state.iter + state.compression_stats_logging_frequency


def _side(numel: int) -> int:
    """Return the side of the smallest square that holds so many numbers."""
    return math.isqrt(numel - 1) + 1 if numel else 0


@dataclass(frozen=True, repr=False)
class Batched:
    """Concatenates all tensors of a bucket, pads them with zeros, and encodes them as one square matrix.

    This takes fewer and larger operations. But the rows and columns of that matrix have no meaning, so a low rank keeps
    less of it: prefer plain `LowRank` unless its many small products cost too much.
    """

    codec: Codec

    __repr__ = as_code
    accepts = accept_every_shape

    def __post_init__(self) -> None:
        check_codec(f"Batched({self.codec!r})", self.codec)

    def average(self, tensors: Tensors, state: State, peers: Peers, *, reuse: bool = False) -> Exchange[Averaged]:
        """Average the square matrix that holds `tensors`."""
        flat = pack(tensors)
        side = _side(flat.numel())
        if not side:
            return Averaged({name: t.clone() for name, t in tensors.items()}, lambda: dict(tensors), true)
        square = flat.new_zeros(side * side)
        square[: flat.numel()] = flat
        name = _name_of(tensors)
        end = yield from self.codec.average({name: square.view(side, side)}, state, peers, reuse=reuse)

        def cut(whole: Tensor) -> dict[str, Tensor]:
            return unpack(whole.reshape(-1)[: flat.numel()], like=tensors)

        return Averaged(cut(end.mean[name]), lambda: cut(end.own()[name]), end.finite, end.decided)


def _name_of(names: Collection[str]) -> str:
    """Return a name made from the names of tensors: the state belongs to one layout of the bucket only."""
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    return f"bucket of {len(names)} ({digest})"
