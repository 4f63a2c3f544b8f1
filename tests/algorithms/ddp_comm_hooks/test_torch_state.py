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

NUMBERS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "orthogonalization_epsilon"),
    *("use_error_feedback", "warm_start", "batch_tensors_with_same_shape", "iter", "next_stats_report"),
    *("total_numel_before_compression", "total_numel_after_compression", "compression_stats_logging_frequency"),
)
FORMATS = ["zip", "legacy"]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="torch.distributed")


def state(dtype: torch.dtype = torch.float32) -> PowerSGDState:
    """A state with every field off its default, two buckets, and a transposed, offset tensor among them."""
    made = PowerSGDState(
        None, 3, 17, 1.5, True, True, 1e-8, 7, compression_stats_logging_frequency=5, batch_tensors_with_same_shape=True
    )
    made.iter = 23
    made.total_numel_before_compression, made.total_numel_after_compression = 1000, 10
    made.next_stats_report = 25
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
    for name in NUMBERS:
        assert getattr(read, name) == getattr(original, name), name
    for name in ("error_dict", "p_memory_dict", "q_memory_dict"):
        ours, theirs = getattr(read, name), getattr(original, name)
        assert list(ours) == list(theirs)
        for bucket in theirs:
            assert ours[bucket].dtype == theirs[bucket].dtype
            assert ours[bucket].shape == theirs[bucket].shape
            assert torch.equal(ours[bucket], theirs[bucket])
    rng, expected = np.random.RandomState(0), np.random.RandomState(0)
    rng.set_state(read.rng)
    expected.set_state(original.rng.get_state())
    assert np.array_equal(rng.randn(1001), expected.randn(1001))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_saved_state_is_read_back_completely(form: str, dtype: torch.dtype):
    original = state(dtype)
    assert_same(read_power_sgd_state(saved(original, form)), original)


@pytest.mark.parametrize("form", FORMATS)
def test_a_state_inside_a_checkpoint_is_found(form: str, tmp_path: Path):
    """The checkpoint of torch's documentation: weights, the hook by reference, and its state."""
    original = state()
    checkpoint = {
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "comm_hook": powerSGD_hook,
        "comm_hook_state": original,
        "shapes": [(1, 2), None, 1e300, 2**70],
        "again": original,
    }
    (tmp_path / "checkpoint.pt").write_bytes(saved(checkpoint, form))
    assert_same(read_power_sgd_state(tmp_path / "checkpoint.pt"), original)
    assert_same(read_power_sgd_state(str(tmp_path / "checkpoint.pt")), original)


def test_globals_that_the_program_registered_are_kept_and_not_used():
    original = state()
    with torch.serialization.safe_globals([PowerSGDState]):  # the real class needs a process group to be built
        registered = set(torch.serialization.get_safe_globals())
        assert_same(read_power_sgd_state(saved(original)), original)
        assert set(torch.serialization.get_safe_globals()) == registered


def test_a_state_of_a_torch_without_batching_is_read():
    fields = state().__getstate__()
    del fields["batch_tensors_with_same_shape"]
    assert read_power_sgd_state(with_fields(fields)).batch_tensors_with_same_shape is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iter", -1),
        ("iter", True),
        ("iter", 2**200),
        ("min_compression_rate", float("nan")),
        ("min_compression_rate", "2"),
        ("warm_start", 1),
        ("error_dict", [torch.ones(1)]),
        ("error_dict", {"0": torch.ones(1)}),
        ("error_dict", {0: "no tensor"}),
        ("rng", None),
        ("a_new_field", 1),
    ],
)
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


@pytest.mark.parametrize("fields", [{"iter": 1}, [1], 7])
def test_missing_fields_are_named(fields: Any):
    with pytest.raises(ValueError, match=r"missing or unknown: .*warm_start"):
        read_power_sgd_state(with_fields(fields))


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_state_is_needed(count: int):
    with pytest.raises(ValueError, match=f"holds {count} PowerSGDState objects"):
        read_power_sgd_state(saved([state() for _ in range(count)]))


class Hostile:
    """Pickles as a call; `pickle.loads` would make the call."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


CALLS = {
    "posix.system": lambda marker: Hostile(os.system, f"mkdir {marker}"),
    "posix.mkdir": lambda marker: Hostile(os.mkdir, str(marker)),
    "eval": lambda marker: Hostile(eval, f"__import__('os').mkdir({str(marker)!r})"),
    "getattr": lambda marker: Hostile(getattr, PowerSGDState, "mro"),
    "torch.serialization.load": lambda marker: Hostile(torch.load, str(marker)),
    "torch.hub.load": lambda marker: Hostile(torch.hub.load, str(marker), "model"),
}


def test_the_call_would_run_under_pickle(tmp_path: Path):
    pickle.loads(pickle.dumps(CALLS["posix.mkdir"](tmp_path / "ran")))  # noqa: S301  what the reader must never do
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("where", ["alone", "beside", "inside"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_by_name_and_does_not_run(tmp_path: Path, name: str, where: str, form: str):
    hostile, original = CALLS[name](tmp_path / "ran"), state()
    if where == "inside":
        original.error_dict = {0: hostile}  # type: ignore[dict-item]
    data = saved({"alone": hostile, "beside": [original, hostile], "inside": original}[where], form)
    with pytest.raises(UnsafePickleError, match=rf"asks for the name {name}, .*nothing from it was run.*torch\.save"):
        read_power_sgd_state(data)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_plain_pickle_is_refused_with_the_way_to_convert_it(protocol: int):
    with pytest.raises(ValueError, match=r"not written by torch\.save.*torch\.save\(pickle\.load\(file\), path\)"):
        read_power_sgd_state(pickle.dumps(state(), protocol))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_another_pickle_protocol_of_torch_save_is_refused():
    file = io.BytesIO()
    torch.save(state(), file, pickle_protocol=4)
    with pytest.raises(UnsafePickleError, match=r"a pickle opcode that torch\.load\(weights_only=True\)"):
        read_power_sgd_state(file.getvalue())


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_file_is_a_value_error(form: str):
    data = saved(state(), form)
    for end in [*range(0, len(data) - 1, max(1, len(data) // 100)), len(data) - 1]:
        with pytest.raises(ValueError):
            read_power_sgd_state(data[:end])


def test_a_missing_file_is_an_os_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_power_sgd_state(tmp_path / "nowhere.pt")
