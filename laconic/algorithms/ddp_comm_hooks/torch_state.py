"""Read a `PowerSGDState` that torch's own hook saved, and convert its memory. No code from the file is run.

`torch.load(weights_only=True)` builds only allow-listed classes. Here each of them is a class that records its state.
"""

from __future__ import annotations

import io
import logging
import math
import os
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.compression import factor_groups
from laconic.codecs import LowRank
from laconic.codecs.contract import wide_dtype

__all__ = ["Conversion", "PickledState", "UnsafePickleError", "read_power_sgd_state"]

logger = logging.getLogger(__name__)

RandomStateTuple = tuple[str, np.ndarray[Any, Any], int, int, float]
_HOOK = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_MENTIONED = (
    *(f"{_HOOK}.powerSGD_hook", f"{_HOOK}.batched_powerSGD_hook"),  # torch's documentation saves the hook as well
    *("numpy.ndarray", "numpy.dtype", "numpy.random._mt19937.MT19937"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),  # numpy 1 and 2
    *("numpy.random._pickle.__bit_generator_ctor", "numpy.random._pickle.__randomstate_ctor"),
)
_FORMATS = (b"PK\x03\x04", b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")  # torch.save's zip; its magic number before 1.6


class UnsafePickleError(ValueError):
    """The file asks for something that a saved `PowerSGDState` does not need. Nothing from the file was run."""


@dataclass(frozen=True, eq=False)
class PickledState:
    """The fields of torch's `PowerSGDState`, under torch's names. Tensors are keyed by bucket index, on the CPU."""

    matrix_approximation_rank: int
    start_powerSGD_iter: int
    min_compression_rate: float
    orthogonalization_epsilon: float
    use_error_feedback: bool
    warm_start: bool
    iter: int
    total_numel_before_compression: int
    total_numel_after_compression: int
    compression_stats_logging_frequency: int
    next_stats_report: int
    rng: RandomStateTuple
    error_dict: Mapping[int, Tensor]
    p_memory_dict: Mapping[int, Tensor]
    q_memory_dict: Mapping[int, Tensor]
    batch_tensors_with_same_shape: bool = False


def read_power_sgd_state(source: str | os.PathLike[str] | bytes) -> PickledState:
    """Return the one `PowerSGDState` in a file that `torch.save` wrote, or in its bytes; a checkpoint may contain it.

    Raises `UnsafePickleError` if the file asks for anything that a saved state does not need, `ValueError` if it is
    damaged or does not hold exactly one state.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        states = _load_states(file)
    if len(states) != 1:
        what = f"the file holds {len(states)} PowerSGDState objects; exactly one can be read"
        raise ValueError(f"{what}. Save the state by itself: torch.save(state, path).")
    return _checked(states[0])


class _Recorded:
    """The class behind every allowed name. It keeps the state that the file gives it and does nothing else."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _load_states(file: BinaryIO) -> list[Any]:
    """Return the pickled fields of each `PowerSGDState` in the file."""
    states: list[Any] = []

    class State(_Recorded):
        def __setstate__(self, state: Any) -> None:
            states.append(state)

    if not file.read(64).startswith(_FORMATS):
        raise ValueError(
            "the file was not written by torch.save; a file from pickle.dump cannot be read. If you trust it, "
            "convert it in a program of your own: torch.save(pickle.load(file), path)."
        )
    file.seek(0)
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # names that the program has registered may be the real classes
    allowed: list[Any] = [(State, f"{_HOOK}.PowerSGDState"), *((_Recorded, name) for name in _MENTIONED)]
    try:
        with torch.serialization.safe_globals(allowed):
            torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+)", str(error))
        what = f"the name {name[1]}" if name else "a pickle opcode that torch.load(weights_only=True) does not have"
        raise UnsafePickleError(
            f"the file asks for {what}, which a saved PowerSGDState does not need. It was refused, and nothing from it "
            "was run. Save the state by itself, torch.save(state, path), or in a dict with tensors and plain values."
        ) from None  # torch's text recommends weights_only=False
    except Exception as error:  # which one depends on where the file is damaged
        raise _damaged(f"{type(error).__name__}: {error}") from error
    finally:
        torch.serialization.add_safe_globals(registered)
    return states


def _damaged(what: str) -> ValueError:
    way_out = "Give a file made by torch.save(state, path); was it copied completely?"
    return ValueError(f"the file is damaged or does not hold a PowerSGDState: {what[:600]}. {way_out}")


def _checked(saved: Any) -> PickledState:
    kinds = {each.name: str(each.type) for each in fields(PickledState)}
    given = {"batch_tensors_with_same_shape": False, **saved} if isinstance(saved, dict) else {}  # new in torch 1.13
    if wrong := kinds.keys() ^ given.keys():
        raise _damaged(f"these fields are missing or unknown: {', '.join(sorted(map(str, wrong)))}")
    given["rng"] = _random_state(given["rng"])
    for name, value in given.items():
        if not _is_valid(value, kinds[name]):
            raise _damaged(f"its {name} is not a valid {kinds[name]}")
    return PickledState(**given)


def _is_valid(value: Any, kind: str) -> bool:
    if kind.startswith("Mapping"):
        return isinstance(value, dict) and all(type(index) is int and type(t) is Tensor for index, t in value.items())
    if kind == "float":
        return type(value) in (int, float) and 0 <= value < math.inf
    return value is not None if kind == "RandomStateTuple" else type(value).__name__ == kind and 0 <= value < 2**63


def _random_state(saved: Any) -> RandomStateTuple | None:
    """Return the argument of `RandomState.set_state`; `None` if it is invalid."""
    try:
        rng = saved.state
        _, _, dtype, _, data = rng["state"]["key"].state  # as numpy pickles an array
        key = np.frombuffer(data, f"{dtype.state[1]}u4").astype(np.uint32)
        position, has_gauss, gauss = int(rng["state"]["pos"]), int(rng["has_gauss"]), float(rng["gauss"])
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    is_inside = len(key) == 624 and 0 <= position <= 624  # numpy does not check it, and would read other memory
    return ("MT19937", key, position, has_gauss, gauss) if is_inside else None


class Conversion:
    """Assigns the memory of a pickled state to parameters, once DDP has the bucket layout that it had when saving."""

    def __init__(self, pickled: PickledState) -> None:
        slots = ["error_dict"] * pickled.use_error_feedback + ["p_memory_dict", "q_memory_dict"] * pickled.warm_start
        self._saved: dict[str, Mapping[int, Tensor]] = {slot: getattr(pickled, slot) for slot in slots}
        self._buckets: list[dict[str, Tensor]] = []
        self._backwards = 0

    def fit(self, tensors: Mapping[str, Tensor], last: bool, state: Any) -> bool:
        """Add one bucket. After the last bucket of the second backward, convert or drop the memory and return True."""
        self._buckets.append(dict(tensors))
        if not last:
            return False
        self._backwards += 1
        if self._backwards < 2:  # DDP rebuilds its buckets after the first backward, as it did before saving
            self._buckets = []
            return False
        low_rank = LowRank(state.matrix_approximation_rank, state.min_compression_rate)
        pieces: list[tuple[str, Any, dict[str, Tensor], dict[str, tuple[int, ...]]]] = [
            (slot, saved.get(index), bucket, _sizes(slot, bucket, low_rank))
            for slot, saved in self._saved.items()
            for index, bucket in enumerate(self._buckets if any(self._saved.values()) else ())
        ]
        if any(flat is None or flat.numel() != sum(map(math.prod, sizes.values())) for _, flat, _, sizes in pieces):
            logger.warning(
                "PowerSGD: the memory that torch saved fits buckets of %s elements, and this model's have %s. It is "
                "dropped. Use the same model and bucket_cap_mb as when it was saved.",
                [t.numel() for t in next(filter(None, self._saved.values())).values()],
                [sum(t.numel() for t in bucket.values()) for bucket in self._buckets],
            )
            return True
        for slot, flat, bucket, sizes in pieces:
            # With feedback="own", tensors that are not compressed have no residual; torch's sum to zero over workers.
            keeps_all = slot == "error_dict" and state.feedback == "mean"
            parts = flat.reshape(-1).split([math.prod(size) for size in sizes.values()])
            for (name, size), part in zip(sizes.items(), parts, strict=True):
                if keeps_all or low_rank.accepts(bucket[name].shape):
                    dtype = wide_dtype(part.dtype)
                    getattr(state, slot)[name] = part.view(size).to(bucket[name].device, dtype, copy=True)
        return True


def _sizes(slot: str, bucket: Mapping[str, Tensor], low_rank: LowRank) -> dict[str, tuple[int, ...]]:
    """Return the shapes in torch's flat tensor of a bucket, in its order: factors are grouped by matrix shape."""
    if slot == "error_dict":
        return {name: tuple(t.shape) for name, t in bucket.items()}
    groups, side = factor_groups(bucket, low_rank), 0 if slot == "p_memory_dict" else 1
    return {name: (shape[side], min(low_rank.rank, *shape)) for shape, names in groups.items() for name in names}
