"""Read a `PowerSGDState` that torch's own hook saved, without running code from the file.

`torch.load(weights_only=True)` builds only allow-listed classes. Here every class and function that a saved state
mentions, numpy's included, is mapped to a class that only records its state.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

__all__ = ["PickledState", "UnsafePickleError", "read_power_sgd_state"]

RandomStateTuple = tuple[str, np.ndarray[Any, Any], int, int, float]
_MODULE = "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook"
_MENTIONED = (
    f"{_MODULE}.powerSGD_hook",  # torch's documentation saves the hook beside its state
    f"{_MODULE}.batched_powerSGD_hook",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.core.multiarray._reconstruct",  # numpy 1
    "numpy._core.multiarray._reconstruct",
    "numpy.random._mt19937.MT19937",
    "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
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
    """The argument of `numpy.random.RandomState.set_state`."""
    error_dict: Mapping[int, Tensor]
    p_memory_dict: Mapping[int, Tensor]
    q_memory_dict: Mapping[int, Tensor]
    batch_tensors_with_same_shape: bool = False


def read_power_sgd_state(source: str | os.PathLike[str] | bytes) -> PickledState:
    """Return the one `PowerSGDState` in a file that `torch.save` wrote, or in its bytes. No code in it is run.

    The state may be one entry of a checkpoint. Raises `UnsafePickleError` if the file asks for anything that a saved
    state does not need, `ValueError` if it is damaged or does not hold exactly one state, `OSError` if it cannot be
    read.
    """
    with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
        states = _load_states(file)
    if len(states) != 1:
        raise ValueError(
            f"the file holds {len(states)} PowerSGDState objects; exactly one can be read. "
            "Save the state by itself: torch.save(state, path)."
        )
    return _checked(states[0])


class _Recorded:
    """The class behind every allowed name. It keeps the state that the file gives it and does nothing else."""

    def __init__(self, *_: Any) -> None:
        self.state: Any = None

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
    try:
        with _only_allowed([(State, f"{_MODULE}.PowerSGDState"), *((_Recorded, name) for name in _MENTIONED)]):
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
    return states


@contextmanager
def _only_allowed(names: list[Any]) -> Iterator[None]:
    """Allow these names, and none that the program has registered: those may be the real classes."""
    registered = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(names):
            yield
    finally:
        torch.serialization.add_safe_globals(registered)


def _damaged(what: str) -> ValueError:
    return ValueError(
        f"the file is damaged or does not hold a PowerSGDState: {what[:600]}. "
        "Give a file made by torch.save(state, path); was it copied completely?"
    )


def _checked(saved: Any) -> PickledState:
    kinds = {each.name: str(each.type) for each in fields(PickledState)}
    if not isinstance(saved, dict) or kinds.keys() - saved.keys() - _OPTIONAL or saved.keys() - kinds.keys():
        wrong = kinds.keys() ^ saved.keys() if isinstance(saved, dict) else kinds
        raise _damaged(f"these fields are missing or unknown: {', '.join(sorted(map(str, wrong)))}")
    for name, value in saved.items():
        if not _IS_VALID[kinds[name]](value):
            raise _damaged(f"its {name} is not a valid {kinds[name]}")
    convert: dict[str, Callable[[Any], Any]] = {"float": float, "RandomStateTuple": _random_state}
    return PickledState(**{name: convert.get(kinds[name], lambda v: v)(value) for name, value in saved.items()})


def _is_random_state(saved: Any) -> bool:
    """Whether this is `{"bit_generator": "MT19937", "state": {"key": array, "pos": 0}, "has_gauss": 0, "gauss": 0.0}`.

    numpy does not check the position and would read memory outside the key.
    """
    try:
        name, key, *numbers = _random_state(saved)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return False
    if name != "MT19937" or len(key) != 624 or [type(number) for number in numbers] != [int, int, float]:
        return False
    return 0 <= numbers[0] <= 624 and numbers[1] in (0, 1) and math.isfinite(numbers[2])


def _random_state(saved: Any) -> RandomStateTuple:
    rng = saved.state
    _, _, dtype, _, data = rng["state"]["key"].state  # as numpy pickles an array
    key = np.frombuffer(data, dtype={"<": "<u4", ">": ">u4"}[dtype.state[1]]).astype(np.uint32)
    return rng["bit_generator"], key, rng["state"]["pos"], rng["has_gauss"], rng["gauss"]


_OPTIONAL = {"batch_tensors_with_same_shape"}  # torch before 1.13 did not save it
_IS_VALID: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and 0 <= value < 2**63,
    "float": lambda value: type(value) in (int, float) and 0 <= value < math.inf,
    "bool": lambda value: type(value) is bool,
    "RandomStateTuple": _is_random_state,
    "Mapping[int, Tensor]": lambda value: (
        isinstance(value, dict)
        and all(type(bucket) is int and bucket >= 0 and type(t) is Tensor for bucket, t in value.items())
    ),
}
