"""A state that torch saved is read back completely. A hostile or damaged file is refused, and nothing in it runs."""

from __future__ import annotations

import io
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from laconic.algorithms.ddp_comm_hooks.torch_state import PickledState, UnsafePickleError, read_power_sgd_state

MEMORY = ("error_dict", "p_memory_dict", "q_memory_dict")
FORMATS = ["zip", "legacy"]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="torch.distributed")


def state(dtype: torch.dtype = torch.float32) -> PowerSGDState:
    """A state with every field off its default, two buckets, and a transposed, offset tensor among them."""
    made = PowerSGDState(
        None, 3, 17, 1.5, True, True, 1e-8, 7, compression_stats_logging_frequency=5, batch_tensors_with_same_shape=True
    )
    made.iter, made.next_stats_report = 23, 25
    made.total_numel_before_compression, made.total_numel_after_compression = 1000, 10
    made.rng.randn(3)  # after an odd number of Gaussians, the rng holds one more
    made.error_dict = {0: torch.randn(10).to(dtype), 4: torch.randn(0).to(dtype)}
    made.p_memory_dict = {0: torch.randn(2, 4, 3).to(dtype), 4: torch.tensor(2.5).to(dtype)}
    made.q_memory_dict = {0: torch.randn(5, 3).to(dtype).t()[1:], 4: torch.arange(6.0).to(dtype)[2:]}
    return made


def saved(obj: Any, form: str = "zip") -> bytes:
    """`obj` as `torch.save` writes it now ("zip") and wrote it before 1.6 ("legacy")."""
    file = io.BytesIO()
    torch.save(obj, file, _use_new_zipfile_serialization=form == "zip")
    return file.getvalue()


def with_fields(fields: Any) -> bytes:
    """A saved PowerSGDState with these fields."""
    made = PowerSGDState.__new__(PowerSGDState)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PowerSGDState, "__getstate__", lambda self: fields)
        return saved(made)


def assert_same(read: PickledState, original: PowerSGDState) -> None:
    for name in set(PowerSGDState.__slots__) - {"process_group", "rng", *MEMORY}:
        assert getattr(read, name) == getattr(original, name), name
    for name in MEMORY:
        ours, theirs = getattr(read, name), getattr(original, name)
        assert list(ours) == list(theirs)
        for bucket in theirs:
            torch.testing.assert_close(ours[bucket], theirs[bucket], rtol=0, atol=0)
    rng, expected = np.random.RandomState(0), np.random.RandomState(0)
    rng.set_state(read.rng)
    expected.set_state(original.rng.get_state())
    assert np.array_equal(rng.randn(1001), expected.randn(1001))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_saved_state_is_read_back_completely(form: str, dtype: torch.dtype):
    original = state(dtype)
    assert_same(read_power_sgd_state(saved(original, form)), original)


@pytest.mark.parametrize("form", FORMATS)
def test_a_state_inside_a_checkpoint_is_found(form: str, tmp_path: Path):
    """The checkpoint of torch's documentation: weights, the hook by reference, and its state."""
    original = state()
    model = torch.nn.Linear(3, 2)
    checkpoint: dict[str, Any] = {"state_dict": model.state_dict(), "parameter": model.bias, "shapes": [(1, 2), 2**70]}
    checkpoint |= {"comm_hook": powerSGD_hook, "comm_hook_state": original, "again": original}
    (tmp_path / "checkpoint.pt").write_bytes(saved(checkpoint, form))
    with torch.serialization.safe_globals([PowerSGDState]):  # what the program has registered is kept and not used
        assert_same(read_power_sgd_state(tmp_path / "checkpoint.pt"), original)
        assert PowerSGDState in torch.serialization.get_safe_globals()


def test_a_state_of_a_torch_without_batching_is_read():
    fields = state().__getstate__()
    del fields["batch_tensors_with_same_shape"]
    assert read_power_sgd_state(with_fields(fields)).batch_tensors_with_same_shape is False


INVALID: list[tuple[str, Any]] = [
    ("iter", -1),
    ("iter", True),
    ("iter", 2**200),
    ("min_compression_rate", float("nan")),
    ("warm_start", 1),
]
INVALID += [("error_dict", [torch.ones(1)]), ("error_dict", {0: "no tensor"}), ("rng", None), ("a_new_field", 1)]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_an_invalid_field_is_named(name: str, value: Any):
    with pytest.raises(ValueError, match=rf"{name}.*torch\.save\(state, path\)"):
        read_power_sgd_state(with_fields({**state().__getstate__(), name: value}))


@pytest.mark.parametrize("change", [{"pos": 625}, {"pos": -1}, {"key": np.zeros(600, np.uint32)}, {"key": 7}])
def test_an_rng_that_numpy_would_read_outside_its_memory_is_refused(change: dict[str, Any]):
    class Changed(np.random.RandomState):
        def __reduce__(self) -> Any:
            make, arguments, rng = super().__reduce__()
            return make, arguments, {**rng, "state": {**rng["state"], **change}}

    with pytest.raises(ValueError, match="rng"):
        read_power_sgd_state(with_fields({**state().__getstate__(), "rng": Changed(0)}))


def test_missing_fields_and_states_are_named():
    for fields in ({"iter": 1}, [1]):
        with pytest.raises(ValueError, match=r"missing or unknown: .*warm_start"):
            read_power_sgd_state(with_fields(fields))
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"holds {count} PowerSGDState objects"):
            read_power_sgd_state(saved([state() for _ in range(count)]))


class Hostile:
    """Pickles as a call; `pickle.loads` would make the call."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


CALLS = {
    "posix.mkdir": lambda marker: Hostile(os.mkdir, str(marker)),
    "eval": lambda marker: Hostile(eval, f"__import__('os').mkdir({str(marker)!r})"),
    "getattr": lambda marker: Hostile(getattr, PowerSGDState, "mro"),
    "torch.hub.load": lambda marker: Hostile(torch.hub.load, str(marker), "model"),
}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_by_name_and_does_not_run(tmp_path: Path, name: str, form: str):
    hostile, original = CALLS[name](tmp_path / "ran"), state()
    original.error_dict = {0: hostile}  # type: ignore[dict-item]
    for data in (saved(hostile, form), saved([state(), hostile], form), saved(original, form)):
        with pytest.raises(
            UnsafePickleError, match=rf"asks for the name {name}, .*nothing from it was run.*torch\.save"
        ):
            read_power_sgd_state(data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_other_pickles_are_refused():
    with pytest.raises(ValueError, match=r"not written by torch\.save.*torch\.save\(pickle\.load\(file\), path\)"):
        read_power_sgd_state(pickle.dumps(state()))
    file = io.BytesIO()
    torch.save(state(), file, pickle_protocol=4)
    with pytest.raises(UnsafePickleError, match=r"a pickle opcode that torch\.load\(weights_only=True\)"):
        read_power_sgd_state(file.getvalue())


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_file_is_a_value_error(form: str):
    data = saved(state(), form)
    for end in [*range(0, len(data) - 1, len(data) // 100), len(data) - 1]:
        with pytest.raises(ValueError):
            read_power_sgd_state(data[:end])
