"""Codecs in few bits: their bytes, numbers of unusual kinds, and residuals over a long run."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import laconic
from laconic.codecs import ByShape, Codec, ErrorFeedback, LowRank, Quantized, TopDCT, TopK
from laconic.codecs.quantized import pack_bits, unpack_bits
from laconic.exchange import State
from tests.laws.world import World, averaged, residuals, same_bits, true_mean

CODECS: list[Codec] = [
    *(Quantized(bits) for bits in (8, 4, 2, 1)),
    Quantized(4, rounding="stochastic"),
    Quantized(1, block=64),
    ByShape(TopK(0.1, chunk=64, bits=2), rest=Quantized(4)),
    *(TopDCT(0.1, chunk=16, bits=bits) for bits in (None, 8, 4, 2)),
    ByShape(LowRank(2, bits=4), rest=Quantized(4)),
]


def unusual(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(24, 40, generator=generator),
        "one": torch.randn(1, generator=generator),
        "zeros": torch.zeros(3, 130),
        "equal": torch.full((300,), 0.1),
        "denormal": torch.full((20, 20), 1e-40) * torch.randn(20, 20, generator=generator).sign(),
        "wide": torch.randn(257, generator=generator) * 10.0 ** torch.linspace(-30, 30, 257),
        "nothing": torch.zeros(0),
    }


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize(
    "workers", [pytest.param(n, marks=[pytest.mark.slow] if n not in (3, 8) else []) for n in range(1, 9)]
)
def test_the_laws_hold_for_unusual_numbers(codec: Codec, workers: int) -> None:
    feedback = ErrorFeedback(codec)
    states: list[State] = [{} for _ in range(workers)]
    truth = [{name: torch.zeros_like(t).double() for name, t in unusual(0).items()} for _ in range(workers)]
    sent = [{name: torch.zeros_like(t).double() for name, t in unusual(0).items()} for _ in range(workers)]
    for step in range(3):
        inputs = [unusual(8 * step + worker) for worker in range(workers)]
        ends = averaged(feedback, inputs, states)
        owns = [end.own() for end in ends]
        assert all(same_bits(end.mean, ends[0].mean) for end in ends)
        assert bool(ends[0].finite())
        assert not ends[0].mean["zeros"].any()
        for name, mean in true_mean(owns).items():
            largest = max([float(own[name].abs().max()) for own in owns if own[name].numel()], default=0.0)
            assert torch.allclose(ends[0].mean[name].double(), mean, rtol=0, atol=1e-5 * largest + 1e-44)
        for worker, (x, own) in enumerate(zip(inputs, owns, strict=True)):
            for name in x:
                truth[worker][name] += x[name].double()
                sent[worker][name] += own[name].double()
    for worker, state in enumerate(states):
        for name, residual in residuals(state).items():
            largest = float(truth[worker][name].abs().max()) if residual.numel() else 0.0
            got = sent[worker][name] + residual.double()
            assert torch.allclose(got, truth[worker][name], rtol=0, atol=2e-4 * largest + 1e-44), name


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_every_worker_notices_nan(codec: Codec, bad: float) -> None:
    inputs = [{name: t.bfloat16() for name, t in unusual(worker).items()} for worker in range(3)]
    inputs[1]["matrix"][3, 5] = bad
    states: list[State] = [{} for _ in range(3)]
    ends = averaged(ErrorFeedback(codec), inputs, states)
    assert not any(bool(end.finite()) for end in ends)
    assert not any(t.any() for state in states for t in residuals(state).values())


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("whole_rows", [True, False])
def test_error_feedback_in_rows_equals_the_plain_composition(bits: int, whole_rows: bool) -> None:
    codec = ErrorFeedback(Quantized(bits))
    plain, rows = World(codec, 3), World(codec, 3, reuse=True)
    for step in range(4):
        inputs = [unusual(3 * step + worker) for worker in range(3)]
        for given in inputs:
            del given["nothing"]  # with an empty tensor, all are averaged one by one
            if whole_rows:
                given |= {name: t.reshape(-1)[:1].expand(2, 128) * t.numel() for name, t in given.items()}
        if step == 2:
            inputs[1]["matrix"][0, 5] = torch.nan  # the step is void, and no residual changes
        before = [{name: t.clone() for name, t in residuals(state).items()} for state in rows.states]
        expected, got = plain.average(inputs), rows.average(inputs)
        assert [bool(end.finite()) for end in got] == [bool(end.finite()) for end in expected] == [step != 2] * 3
        assert step != 2 or all(map(same_bits, before, map(residuals, rows.states)))
        for a, b in zip(got, expected, strict=True):
            assert same_bits(a.mean, b.mean)
        assert all(same_bits(residuals(a), residuals(b)) for a, b in zip(rows.states, plain.states, strict=True))


def test_error_feedback_in_rows_takes_residuals_that_were_loaded() -> None:
    codec = ErrorFeedback(Quantized(2))
    going_on, loaded = World(codec, 2, reuse=True), World(codec, 2, reuse=True)
    for step in range(4):
        inputs = [{k: t for k, t in unusual(2 * step + worker).items() if t.numel()} for worker in range(2)]
        for a, b in zip(going_on.average(inputs), loaded.average(inputs), strict=True):
            assert same_bits(a.mean, b.mean)
        assert all(same_bits(a, b) for a, b in zip(going_on.states, loaded.states, strict=True))
        for state in loaded.states:
            state["residual"] = {name: t.clone() for name, t in state["residual"].items()}
            state["residual"].pop("matrix" if step == 1 else "", None)
        if step == 1:  # one that is not there counts as zeros
            for state in going_on.states:
                state["residual"]["matrix"].zero_()


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_rows_are_decoded_beside_their_messages(bits: int, dtype: torch.dtype) -> None:
    codec = Quantized(bits, block=64)
    rows = torch.randn(300, 64, generator=torch.Generator().manual_seed(bits)).to(dtype)
    rows[:200] *= 10.0 ** torch.linspace(-44, 37, 200)[:, None]
    rows[200:202, 3], rows[202, 3], rows[203] = torch.nan, torch.inf, 0
    rows[204, 5:] = 0
    counts = torch.full((300,), 64)
    counts[204] = 5
    for given in (None, counts):
        messages, decoded = codec.encode_and_decode(rows, given)
        assert torch.equal(messages, codec.encode(rows, given, None))
        assert same_bits({"": decoded}, {"": codec.decode(messages, dtype)})


@pytest.mark.parametrize("bits", [8, 4])
def test_no_number_is_beyond_the_codes(bits: int) -> None:
    """The step is rounded to 8 bits of precision: down by at most half of the last one."""
    codec, largest = Quantized(bits, block=8), (2**bits - 1) // 2
    steps = torch.arange(1, 2, 2**-13)[:, None]  # all that rounding can do to a step
    for power in (2.0**-100, 1.0, 2.0**100):
        rows = steps * largest * power * torch.tensor([1, -1, 0.5, -0.5, 0.3, -0.9, 0.99, -0.99])
        decoded = codec.decode(codec.encode(rows, None, None), torch.float32)
        assert ((decoded - rows).abs() <= 0.51 * steps * power).all()


@pytest.mark.parametrize("bits", [8, 4, 2, 1])
def test_codes_are_packed_from_the_lowest_bits_on(bits: int) -> None:
    codes = torch.randint(2**bits, (5, 21), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(codes, (0, -21 % (8 // bits))).unflatten(1, (-1, 8 // bits))
    packed = pack_bits(codes, bits)
    assert torch.equal(packed, (padded << (bits * torch.arange(8 // bits))).sum(-1).to(torch.uint8))
    assert torch.equal(unpack_bits(packed.unflatten(0, (5, 1)), bits, 21), codes.unflatten(0, (5, 1)))


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_bytes_are_those_of_the_bits(bits: int, workers: int) -> None:
    shapes = {"up": (512, 2048), "down": (2048, 512), "embed": (1000, 512), "gain": (512,), "bias": (2048,)}
    dense = laconic.sent_bytes(laconic.ddp(), shapes, workers)
    sent = laconic.sent_bytes(laconic.quantized_ddp(bits), shapes, workers)
    assert 0.93 * 32 / bits < dense / sent <= 32 / bits


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(Quantized(4), marks=pytest.mark.nightly),
        pytest.param(Quantized(2), marks=pytest.mark.slow),
        pytest.param(Quantized(1), marks=pytest.mark.nightly),
    ],
    ids=repr,
)
def test_residuals_are_bounded_over_3000_steps_of_different_data(codec: Codec) -> None:
    workers, generator = 4, torch.Generator().manual_seed(1)
    centres = [torch.randn(16, 32, generator=generator) for _ in range(workers)]
    states: list[State] = [{} for _ in range(workers)]
    norms = []
    for _ in range(3000):
        inputs = [{"w": centre + 0.5 * torch.randn(16, 32, generator=generator)} for centre in centres]
        averaged(ErrorFeedback(codec), inputs, states)
        norms.append(max(float(residual.norm()) for state in states for residual in residuals(state).values()))
    assert max(norms[2000:]) < 1.5 * max(norms[200:1000])


@pytest.mark.parametrize("codec", [TopK(0.03), TopK(0.03, bits=2), TopDCT(0.03, bits=None), TopDCT(0.03)], ids=repr)
def test_a_single_row_can_be_sent(codec: Codec) -> None:
    given = [{"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(seed))} for seed in range(2)]
    states: list[State] = [{}, {}]
    for end, state, x in zip(averaged(ErrorFeedback(codec), given, states), states, given, strict=True):
        torch.testing.assert_close(end.own()["w"] + residuals(state)["w"], x["w"], rtol=0, atol=1e-5)
