"""Rows in few bits and the largest numbers of a chunk: the kernels against the plain code.

`check` runs on the CPU in Triton's interpreter, in a process of its own, and on a GPU (`pytest -m gpu`).
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import ErrorFeedback, LowRank
from laconic.codecs.low_rank import Factors
from laconic.codecs.quantized import Quantized, decode_rows, encode_rows, unpack_indices, width
from laconic.codecs.sparse import TopK
from laconic.comm.lockstep import lockstep
from laconic.exchange import Peers, State
from tests.kernels.gradients import GPU
from tests.laws.world import averaged

NAN, INFINITE, PADDED = 4, 5, 7
"""Rows of `rows`."""


def on_gpu(test):
    """Run a test on a GPU only."""
    for mark in GPU:
        test = mark(test)
    return test


def rows(n: int, block: int) -> Tensor:
    """Return rows of all kinds: zeros, denormals, large numbers, NaN, Inf, equal numbers, padding."""
    x = torch.randn(n, block, generator=torch.Generator().manual_seed(n))
    x[1], x[6], x[PADDED, 5:] = 0, 0.25, 0
    x[2] *= 1e-41
    x[3] *= 1e30
    x[NAN, 3], x[INFINITE, 1] = torch.nan, torch.inf
    return x


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal, NaN included."""
    return torch.equal(a.cpu().nan_to_num(7.0), b.cpu().nan_to_num(7.0))


def check_rows(device: str, bits: int) -> None:
    """The bytes are those of the plain code on the CPU, which divides exactly."""
    from laconic.kernels.cuda import rows as kernels  # needs Triton

    for block in (16, 128):
        x = rows(37, block)
        counts = torch.full((37,), block)
        counts[PADDED] = 5
        for given in (None, counts):
            expected = encode_rows(x, bits, given)
            there = None if given is None else given.to(device)
            got = kernels.encode(x.to(device), width(block, bits), bits, there)
            finite = torch.arange(37).ne(NAN) & torch.arange(37).ne(INFINITE)
            if bits > 2:
                assert torch.equal(got.cpu()[finite], expected[finite])
            else:  # the sum of a row may be rounded otherwise
                a, b = (decode_rows(m.cpu()[finite], bits, block, torch.float32) for m in (got, expected))
                assert ((a - b).norm(dim=1) <= 0.01 * b.norm(dim=1)).all()
            decoded = kernels.decode(got, bits, block)
            assert equal(decoded, decode_rows(got.cpu(), bits, block, torch.float32))
            assert not decoded[NAN].isfinite().any()
            assert not decoded[INFINITE].isfinite().all()
    assert kernels.encode(torch.zeros(0, 128).to(device), width(128, bits), bits, None).shape == (0, width(128, bits))


def check_largest(device: str, codec: TopK) -> None:
    """Without ties the bytes are equal, but for places of numbers with equal magnitude."""
    from laconic.kernels.cuda import rows as kernels  # needs Triton

    x = rows(9, codec.chunk)
    x[INFINITE, 1] = 1.0
    expected = codec.encode(x, None, None)
    got = kernels.encode_largest(x.to(device), codec.kept, codec.values_bytes, codec.bits)
    distinct = [0, 3, INFINITE, 8]
    assert torch.equal(got.cpu()[distinct], expected[distinct])
    decoded = kernels.decode_largest(got, codec.kept, codec.chunk, codec.bits)
    assert equal(decoded, codec.decode(got.cpu(), torch.float32))
    assert not decoded[NAN].isfinite().all()
    equals = decoded[6].cpu().nonzero().flatten()
    assert equals.tolist() == list(range(codec.kept))  # the lowest places


def gradients(dtype: torch.dtype, seed: int, device: str) -> dict[str, Tensor]:
    """Return tensors with full rows, odd sizes, zeros and one element; "v" starts at an odd address."""
    shapes = {"m": (70, 93), "one": (1,), "zeros": (200,), "full": (128 * 33,), "v": (1000,)}
    source = torch.Generator().manual_seed(seed)
    flat = torch.randn(1 + sum(torch.Size(s).numel() for s in shapes.values()), generator=source).to(device, dtype)
    found, at = {}, 1
    for name, shape in shapes.items():
        found[name] = flat[at : at + torch.Size(shape).numel()].view(shape)
        at += found[name].numel()
    found["zeros"].zero_()
    found["full"] = 1e-3 * found["full"]  # in memory of its own, at a multiple of 16 bytes
    return found


def check_feedback(device: str, bits: int, dtype: torch.dtype, workers: int = 3) -> None:
    """Means and residuals are those of the plain code; a step with NaN changes no residual."""
    from laconic.kernels.cuda.shards import quantized_feedback  # needs Triton

    codec = Quantized(bits)
    residuals: list[dict[str, Tensor]] = [{} for _ in range(workers)]
    fast: list[State] = [{} for _ in range(workers)]
    plain: list[State] = [{} for _ in range(workers)]
    for step in range(3):
        given = [gradients(dtype, 10 * step + worker, device) for worker in range(workers)]
        given[1]["full"][7] = torch.nan if step == 2 else 0.5
        before, kept = copy.deepcopy(given), copy.deepcopy(residuals)
        expected = averaged(ErrorFeedback(codec), before, plain)
        fused = partial(quantized_feedback, bits, codec.block)
        each_worker = enumerate(zip(given, residuals, fast, strict=True))
        ends = lockstep([fused(*each, Peers(rank, workers)) for rank, each in each_worker])
        for worker, end in enumerate(ends):
            assert bool(end.finite()) == (step < 2)
            for name, mean in end.mean.items():
                assert mean is given[worker][name]
                assert equal(mean, ends[0].mean[name])
                if step == 2:
                    assert torch.equal(residuals[worker][name], kept[worker][name])
                    continue
                # A tie may be rounded otherwise, and with 2 bits and 1 bit a step; in the interpreter bf16 is cut.
                scale = max(1e-6, *(float(each[name].float().abs().max()) for each in before))
                one = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-6 if bits > 2 else 0.01)
                off = (mean.float() - expected[0].mean[name].float()).abs()
                assert (off > one * scale).float().mean() <= 0.01, (step, worker, name)
                # What is delivered and what is kept is the truth.
                truth = sum(t[name].float() + kept[w].get(name, 0.0) for w, t in enumerate(before)) / workers
                got = mean.float() + sum(residual[name] for residual in residuals) / workers
                assert (got - truth).abs().max() <= 1e-5 * scale, (step, name)
                plain[worker]["residual"][name] = residuals[worker][name].clone()


def check_factors(device: str, bits: int, rounds: Any, workers: int = 2) -> None:
    """Factors in few bits have the same means and own parts as in the plain code."""
    from laconic.kernels.cuda.fused import bind  # needs Triton

    codec = LowRank(3, rounds=rounds, min_compression=0, bits=bits)
    residuals: list[dict[str, Tensor]] = [{} for _ in range(workers)]
    factors = [Factors({}) for _ in range(workers)]
    plain: list[State] = [{} for _ in range(workers)]
    source = torch.Generator().manual_seed(bits)
    for step in range(2):
        shapes = {"a": (70, 92), "b": (65, 67)}
        given = [
            {name: torch.randn(shape, generator=source).to(device) for name, shape in shapes.items()}
            for _ in range(workers)
        ]
        before = copy.deepcopy(given)
        expected = averaged(ErrorFeedback(codec), before, plain)
        pairs = zip(given, residuals, factors, strict=True)
        bound = [bind(codec, t, {}, t, residual, known) for t, residual, known in pairs]
        ends = lockstep([each.exchange(Peers(rank, workers)) for rank, each in enumerate(bound)])
        for worker, end in enumerate(ends):
            for name, mean in end.mean.items():
                limit = 1e-5 * before[worker][name].norm()
                assert torch.equal(mean, ends[0].mean[name])
                assert (mean - expected[worker].mean[name]).norm() <= limit, (step, name)
                assert (residuals[worker][name] - plain[worker]["residual"][name]).norm() <= limit, (step, name)


INTERPRETED = ["rows", "largest", "feedback", "factors"]


def check(device: str, what: str) -> None:
    """Run the checks of one kind."""
    if what == "rows":
        for bits in (8, 4, 2, 1):
            check_rows(device, bits)
    if what == "largest":
        for codec in (TopK(0.03), TopK(0.03, bits=2), TopK(0.2, chunk=256), TopK(0.05, chunk=512, bits=2)):
            check_largest(device, codec)
    if what == "feedback":
        for bits, dtype in ((8, torch.bfloat16), (4, torch.float32), (2, torch.float16), (1, torch.float32)):
            check_feedback(device, bits, dtype)
    if what == "factors":
        for bits in (4, 2):
            for rounds in ("two", "alternating"):
                check_factors(device, bits, rounds)


@pytest.mark.slow
@pytest.mark.parametrize("what", INTERPRETED)
def test_the_kernels_in_tritons_interpreter(what):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ, TRITON_INTERPRET="1")  # Triton reads it at import, hence a new process
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        f"from tests.kernels.test_rows import check; check('cpu', {what!r})",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]


@on_gpu
@pytest.mark.parametrize("what", INTERPRETED)
def test_the_kernels_on_a_gpu(what):
    check("cuda", what)


@on_gpu
def test_the_codecs_choose_the_kernels():
    states: list[State] = [{}, {}]
    codec = ErrorFeedback(Quantized(4))
    given = [gradients(torch.float32, worker, "cuda") for worker in range(2)]
    averaged(codec, given, states, reuse=True)
    assert "_tiles" in states[0]["inner"]


def test_places_are_sent_in_ascending_order():
    codec = TopK(0.1, chunk=256)
    message = codec.encode(rows(9, 256), None, None)
    places = unpack_indices(message[:, 4 * codec.kept :], 8, codec.kept)
    assert (places.diff() > 0).all()


def test_padding_does_not_change_the_step_of_a_mean():
    def mean(numel: int) -> Tensor:
        given = [{"w": torch.full((numel,), 3.0)} for _ in range(2)]
        return averaged(Quantized(2), given)[0].mean["w"]

    assert torch.equal(mean(5), mean(128)[:5])  # 123 numbers of padding are no part of the mean magnitude
