"""A saved state is read back whole; a hostile or damaged file is refused, and nothing in it runs."""

from __future__ import annotations

import io
import logging
import os
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from laconic.torch_pickle import PickledState, UnsafePickleError, machine, read_power_sgd_state
from laconic.torch_pickle.names import POWER_SGD

NUMBERS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate", "orthogonalization_epsilon"),
    *("use_error_feedback", "warm_start", "batch_tensors_with_same_shape", "iter", "next_stats_report"),
    *("total_numel_before_compression", "total_numel_after_compression", "compression_stats_logging_frequency"),
)


def name(path: str) -> bytes:
    """The opcode that names something to import."""
    module, attribute = path.rsplit(".", 1)
    return f"c{module}\n{attribute}\n".encode()


STATE = name(f"{POWER_SGD}.PowerSGDState")
TENSORS = ("error_dict", "p_memory_dict", "q_memory_dict")


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
    made.rng.randn(3)  # an odd number of Gaussians leaves one in reserve
    made.error_dict = {0: torch.randn(10).to(dtype), 4: torch.randn(0).to(dtype)}
    made.p_memory_dict = {0: torch.randn(2, 4, 3).to(dtype), 4: torch.tensor(2.5).to(dtype)}
    made.q_memory_dict = {0: torch.randn(5, 3).to(dtype).t()[1:], 4: torch.arange(6.0).to(dtype)[2:]}
    return made


def saved(obj: Any, form: str) -> bytes:
    """`obj` as `torch.save` writes it, now ("zip") and before 1.6 ("legacy"), or by pickle's protocol number."""
    if form.isdigit():
        return pickle.dumps(obj, protocol=int(form))
    file = io.BytesIO()
    torch.save(obj, file, _use_new_zipfile_serialization=form == "zip")
    return file.getvalue()


def assert_same(read: PickledState, original: PowerSGDState) -> None:
    for name in NUMBERS:
        assert getattr(read, name) == getattr(original, name), name
    for name in TENSORS:
        ours, theirs = getattr(read, name), getattr(original, name)
        assert list(ours) == list(theirs)
        for bucket in theirs:
            assert ours[bucket].dtype == theirs[bucket].dtype
            assert ours[bucket].shape == theirs[bucket].shape
            assert torch.equal(ours[bucket], theirs[bucket])
    rng = np.random.RandomState(0)
    rng.set_state(read.rng.for_numpy())
    expected = np.random.RandomState(0)
    expected.set_state(original.rng.get_state())
    assert np.array_equal(rng.randn(1001), expected.randn(1001))


@pytest.mark.parametrize("form", ["zip", "legacy", "0", "1", "2", "3", "4", "5"])
def test_a_saved_state_is_read_back_whole(form: str):
    original = state()
    assert_same(read_power_sgd_state(saved(original, form)), original)


@pytest.mark.parametrize("form", ["zip", "legacy", "4"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_floating_dtype_is_read(form: str, dtype: torch.dtype):
    original = state(dtype)
    assert_same(read_power_sgd_state(saved(original, form)), original)


@pytest.mark.parametrize("form", ["zip", "legacy", "2", "4"])
def test_a_state_inside_a_checkpoint_is_found(form: str):
    """The checkpoint of torch's documentation: weights, the hook by reference, and its state."""
    original = state()
    checkpoint = {
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1).state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "comm_hook": powerSGD_hook,
        "comm_hook_state": original,
        "shapes": [(1, 2), None, 1e300, 2**70],
    }
    assert_same(read_power_sgd_state(saved(checkpoint, form)), original)


def test_a_file_is_read_by_its_path(tmp_path: Path):
    original = state()
    torch.save(original, tmp_path / "state.pt")
    assert_same(read_power_sgd_state(tmp_path / "state.pt"), original)
    assert_same(read_power_sgd_state(str(tmp_path / "state.pt")), original)


def test_tensors_do_not_share_memory_with_the_file_or_each_other():
    data = saved(state(), "zip")
    first, second = read_power_sgd_state(data), read_power_sgd_state(data)
    first.error_dict[0].zero_()
    assert second.error_dict[0].abs().sum() > 0


def test_a_state_of_a_torch_that_had_no_batching_is_read():
    original = state()
    fields = original.__getstate__()
    del fields["batch_tensors_with_same_shape"]
    assert read_power_sgd_state(_with_fields(fields)).batch_tensors_with_same_shape is False


def _with_fields(fields: Any) -> bytes:
    """A pickled PowerSGDState with these fields, whatever they are."""
    return STATE + b")\x81" + pickle.dumps(fields, protocol=2)[2:-1] + b"b."


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iter", -1),
        ("iter", 1.0),
        ("iter", True),
        ("iter", 2**200),
        ("min_compression_rate", float("nan")),
        ("min_compression_rate", "2"),
        ("warm_start", 1),
        ("error_dict", [torch.ones(1)]),
        ("error_dict", {"0": torch.ones(1)}),
        ("error_dict", {0: "no tensor"}),
        ("error_dict", {True: torch.ones(1)}),
        ("rng", 5),
        ("rng", None),
        ("a_new_field", 1),
    ],
)
def test_a_field_that_is_not_what_it_should_be_is_refused(name: str, value: Any):
    fields = {**state().__getstate__(), name: value}
    with pytest.raises(ValueError, match=name):
        read_power_sgd_state(_with_fields(fields))


@pytest.mark.parametrize("fields", [{}, {"iter": 1}, [1], None, 7])
def test_missing_fields_are_named(fields: Any):
    with pytest.raises(ValueError, match=r"lacks|no fields"):
        read_power_sgd_state(_with_fields(fields))


@pytest.mark.parametrize("count", [0, 2])
def test_exactly_one_state_is_needed(count: int):
    with pytest.raises(ValueError, match=f"holds {count} PowerSGDState objects"):
        read_power_sgd_state(saved([state() for _ in range(count)], "zip"))


def test_a_file_over_the_limit_is_not_read(tmp_path: Path):
    path = tmp_path / "state.pt"
    torch.save(state(), path)
    size = path.stat().st_size
    with pytest.raises(ValueError, match=rf"has {size} bytes; at most 100 are read.*limit_bytes={size}"):
        read_power_sgd_state(path, limit_bytes=100)
    with pytest.raises(ValueError, match="at most 100 are read"):
        read_power_sgd_state(path.read_bytes(), limit_bytes=100)


def test_a_missing_file_or_a_folder_is_said(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        read_power_sgd_state(tmp_path / "nowhere.pt")
    with pytest.raises(ValueError, match="is not a file"):
        read_power_sgd_state(tmp_path)


# --- hostile files


class Hostile:
    """Pickles as a call; `pickle.loads` of it would make the call."""

    def __init__(self, call: Any, *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.args


def harmless(marker: Path) -> Any:
    """Proof that the pattern works: this one really makes the marker when pickle loads it."""
    return Hostile(os.mkdir, str(marker))


CALLS = {
    "os.system": lambda marker: Hostile(os.system, f"mkdir {marker}"),
    "posix.mkdir": harmless,
    "builtins.eval": lambda marker: Hostile(eval, f"__import__('os').mkdir({str(marker)!r})"),
    "builtins.exec": lambda marker: Hostile(exec, f"import os; os.mkdir({str(marker)!r})"),
    "builtins.getattr": lambda marker: Hostile(getattr, PowerSGDState, "mro"),
    "builtins.__import__": lambda marker: Hostile(__import__, "os"),
    "torch.load": lambda marker: Hostile(torch.load, str(marker)),
    "pickle.loads": lambda marker: Hostile(pickle.loads, pickle.dumps(harmless(marker))),
    "torch.hub.load": lambda marker: Hostile(torch.hub.load, str(marker), "model"),
}


def test_the_pattern_would_run_under_pickle(tmp_path: Path):
    pickle.loads(pickle.dumps(harmless(tmp_path / "ran")))  # noqa: S301  what the reader must never do
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("form", ["zip", "legacy", "0", "2", "4"])
@pytest.mark.parametrize("where", ["alone", "beside", "inside"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_anything_else_is_refused_by_name_and_does_not_run(tmp_path: Path, name: str, where: str, form: str):
    hostile = CALLS[name](tmp_path / "ran")
    original = state()
    if where == "inside":
        original.error_dict = {0: hostile}
    data = saved({"alone": hostile, "beside": [original, hostile], "inside": original}[where], form)
    with pytest.raises(UnsafePickleError, match="refused, nothing was run"):
        read_power_sgd_state(data)
    assert not (tmp_path / "ran").exists()


def test_the_name_that_was_refused_is_in_the_message():
    with pytest.raises(UnsafePickleError, match=r"names '(posix|nt)\.system', which no saved PowerSGDState needs"):
        read_power_sgd_state(pickle.dumps(Hostile(os.system, "true")))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(STATE + b"}b.", id="BUILD on a class"),
        pytest.param(name("torch._utils._rebuild_tensor_v2") + b"N}X\x01\x00\x00\x00aK\x01s\x86b.", id="BUILD slots"),
        pytest.param(b"K\x01)R.", id="call of a number"),
        pytest.param(STATE + b")\x81)R.", id="call of an object"),
        pytest.param(STATE + b"K\x01R.", id="call with no tuple"),
        pytest.param(b"(ios\nsystem\n.", id="INST"),
        pytest.param(b"(" + STATE + b"o.", id="OBJ"),
        pytest.param(b"\x82\x01.", id="EXT1"),
        pytest.param(b"Pan id\n.", id="PERSID"),
        pytest.param(b"\x97.", id="NEXT_BUFFER"),
        pytest.param(b"\x8c\x08builtins\x8c\x0bobject.mro_\x93.", id="STACK_GLOBAL with a path"),
        pytest.param(name(f"{POWER_SGD}.logger"), id="another name of the same module"),
        pytest.param(name("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.math.sys"), id="a path"),
    ],
)
def test_other_ways_to_run_something_are_refused(program: bytes):
    with pytest.raises(UnsafePickleError):
        read_power_sgd_state(program)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b".", id="only STOP"),
        pytest.param(b"K\x01K\x02.", id="two values"),
        pytest.param(b"K\x01", id="no STOP"),
        pytest.param(b"\xff\xfe\xfd", id="no opcode"),
        pytest.param(b"\x80\x09.", id="a protocol to come"),
        pytest.param(b"0.", id="POP of nothing"),
        pytest.param(b"t.", id="TUPLE without MARK"),
        pytest.param(b"(\x85.", id="TUPLE1 of a MARK"),
        pytest.param(b"h\x05.", id="a memo never stored"),
        pytest.param(b"N(u.", id="SETITEMS of None"),
        pytest.param(b"}(K\x01u.", id="half an item"),
        pytest.param(b"NK\x01a.", id="APPEND to None"),
        pytest.param(b"})K\x01s.", id="a tuple as a key"),
        pytest.param(b"K\x01K\x02\x93.", id="STACK_GLOBAL of numbers"),
        pytest.param(b"X\xff\xff\xff\x7fab.", id="a text of 2 GB"),
        pytest.param(b"\x8e" + b"\xff" * 7 + b"\x7fab.", id="bytes of 9 EB"),
        pytest.param(b"\x8b\xff\xff\xff\x7fab.", id="an int of 2 GB"),
        pytest.param(b"\x95" + b"\xff" * 8 + b".", id="a frame of 16 EB"),
        pytest.param(b"I" + b"9" * 10_000 + b"\n.", id="an int of 10,000 digits"),
        pytest.param(b"cos\n.", id="half a name"),
        pytest.param(name("copyreg._reconstructor") + b"K\x01K\x01N\x87R.", id="_reconstructor of a number"),
    ],
)
def test_a_damaged_pickle_is_a_value_error(program: bytes):
    with pytest.raises(ValueError):
        read_power_sgd_state(program)


def test_a_huge_memo_index_costs_nothing():
    """`pickle` itself would allocate 34 GB for this."""
    with pytest.raises(ValueError, match="holds 0 PowerSGDState"):
        read_power_sgd_state(b"Nr\xff\xff\xff\x7f.")


def test_deep_nesting_ends_in_an_answer():
    for program in (b")" + b"\x85" * 300_000 + b".", b"]" * 100_000 + b"a" * 99_999 + b"."):
        with pytest.raises(ValueError, match="holds 0 PowerSGDState"):
            read_power_sgd_state(program)


def test_too_many_opcodes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "MAX_OPCODES", 1000)
    with pytest.raises(ValueError, match="more than 1000 opcodes"):
        read_power_sgd_state(b"N" * 1001 + b".")


def with_tensor(change: dict[str, Any]) -> bytes:
    """A state in zip form whose one tensor (offset 2, size 2 x 3, stride 3 x 1, storage of 8) has other numbers."""
    parts = {"offset": 2, "size": (2, 3), "stride": (3, 1), "length": 8, "key": "0", **change}
    file = io.BytesIO()
    original = state()
    original.error_dict = {0: torch.arange(8.0)[2:].view(2, 3)}
    original.p_memory_dict, original.q_memory_dict = {}, {}
    torch.save(original, file)
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    text = records["archive/data.pkl"]
    start = text.index(b"((", text.index(b"_rebuild_tensor_v2"))
    end = text.index(b"\x89ccollections", start)
    storage = _push(("storage", torch.FloatStorage, parts["key"], "cpu", parts["length"])) + b"Q"
    layout = b"".join(_push(parts[part]) for part in ("offset", "size", "stride"))
    records["archive/data.pkl"] = text[:start] + b"(" + storage + layout + text[end:]
    return zipped(records)


def _push(value: Any) -> bytes:
    """The opcodes that push this value."""
    if isinstance(value, tuple):
        return b"(" + b"".join(_push(each) for each in value) + b"t"
    if value is torch.FloatStorage:
        return b"ctorch\nFloatStorage\n"
    return pickle.dumps(value, protocol=2)[2:-1].replace(b"q\x00", b"")


def zipped(records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for record, data in records.items():
            archive.writestr(record, data)
    return file.getvalue()


def test_the_tensor_that_the_next_tests_bend_is_right_when_left_alone():
    read = read_power_sgd_state(with_tensor({}))
    assert torch.equal(read.error_dict[0], torch.arange(8.0)[2:].view(2, 3))


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 3},
        {"offset": -1},
        {"offset": 2**62},
        {"offset": True},
        {"size": (2, 4)},
        {"size": (2**31, 2**31)},
        {"size": (-1, 3)},
        {"size": (2, 3, 1)},
        {"size": 6},
        {"size": (0,) * 2, "offset": 9},
        {"size": (9,), "stride": (0,)},
        {"stride": (4, 1)},
        {"stride": (-3, 1)},
        {"stride": (3.0, 1)},
        {"size": (1,) * 20, "stride": (1,) * 20},
        {"length": 7},
        {"length": 9},
        {"length": 2**47},
        {"length": -8},
        {"length": "8"},
        {"key": "1"},
        {"key": "../data.pkl"},
        {"key": 0},
    ],
)
def test_a_tensor_outside_its_storage_is_refused(change: dict[str, Any]):
    with pytest.raises(ValueError):
        read_power_sgd_state(with_tensor(change))


def test_many_tensors_of_one_storage_cannot_fill_the_memory():
    one = torch.zeros(100_000)
    original = state()
    original.error_dict = dict.fromkeys(range(1000), one)
    with pytest.raises(ValueError, match="together are longer than the file"):
        read_power_sgd_state(saved(original, "zip"))


def records_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def test_a_compressed_archive_is_refused_before_it_is_unpacked():
    records = records_of(saved(state(), "zip")) | {"archive/data/bomb": bytes(10_000_000)}
    with pytest.raises(ValueError, match=r"compressed, which torch\.save never does"):
        read_power_sgd_state(zipped(records, zipfile.ZIP_DEFLATED))


def test_an_archive_from_a_big_endian_machine_is_refused():
    records = records_of(saved(state(), "zip")) | {"archive/byteorder": b"big"}
    with pytest.raises(ValueError, match="big-endian"):
        read_power_sgd_state(zipped(records))


@pytest.mark.parametrize("change", ["none", "two"])
def test_an_archive_has_one_pickle(change: str):
    records = records_of(saved(state(), "zip"))
    text = records.pop("archive/data.pkl")
    if change == "two":
        records |= {"archive/data.pkl": text, "other/data.pkl": text}
    with pytest.raises(ValueError, match=r"no data\.pkl, or several"):
        read_power_sgd_state(zipped(records))


def test_records_that_overlap_cannot_be_longer_than_the_file():
    """The central directory says that the records are larger than they are."""
    data = bytearray(saved(state(), "zip"))
    at = data.index(b"PK\x01\x02")
    data[at + 20 : at + 28] = struct.pack("<II", 2**30, 2**30)
    with pytest.raises(ValueError):
        read_power_sgd_state(bytes(data))


@pytest.mark.parametrize("form", ["zip", "legacy", "4"])
def test_a_file_cut_anywhere_is_a_value_error(form: str):
    data = saved(state(), form)
    for end in [*range(0, len(data) - 1, max(1, len(data) // 150)), len(data) - 1]:
        with pytest.raises(ValueError):
            read_power_sgd_state(data[:end])


GOOD: dict[str, bytes] = {}


def good(form: str) -> bytes:
    if form not in GOOD:
        logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
        torch.manual_seed(0)
        GOOD[form] = saved({"state": state(), "more": torch.ones(3)}, form)
    return GOOD[form]


@pytest.mark.parametrize("form", ["zip", "legacy", "2", "5"])
@given(data=st.data())
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_file_is_read_or_refused_and_nothing_else(form: str, data: st.DataObject):
    mutated = bytearray(good(form))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        kind = data.draw(st.sampled_from(["set", "delete", "insert", "copy"]))
        if kind == "set":
            mutated[at] = data.draw(st.integers(0, 255))
        elif kind == "delete":
            del mutated[at : at + data.draw(st.integers(1, 20))]
        elif kind == "insert":
            mutated[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        else:
            other = data.draw(st.integers(0, len(mutated) - 1))
            mutated[at : at + 20] = mutated[other : other + 20]
    try:
        read = read_power_sgd_state(bytes(mutated))
    except ValueError:
        return
    assert isinstance(read, PickledState)


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_refused(data: bytes):
    with pytest.raises(ValueError):
        read_power_sgd_state(data)
