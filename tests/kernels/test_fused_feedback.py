"""The fused paths against the plain composition that they replace: `ErrorFeedback(LowRank)`.

The same tests run over in-place products on the CPU, over Triton's kernels in its interpreter, where it is installed,
and over Triton's kernels on a GPU.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.codecs import ByShape, ErrorFeedback, Exact, LowRank
from laconic.codecs.orthonormal import orthonormal
from laconic.comm.lockstep import lockstep
from laconic.comm.requests import State

HAS_GPU = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU here")])]

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "square": [(64, 64)],
    "odd": [(37, 53), (129, 65), (33, 200), (301, 35)],
    "repeated": [(48, 40), (48, 40), (48, 40), (48, 40), (48, 40), (40, 48), (40, 48), (40, 48)],
    "convolution": [(64, 16, 3, 3), (32, 64, 1, 1)],
    "tall and wide": [(2500, 34), (34, 1500)],
}


def inputs(
    shapes: Sequence[tuple[int, ...]], workers: int, step: int, device: str, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Gradients in one flat bucket for each worker: lasting directions, each a quarter of the last, and a little noise.

    (On noise alone, power iteration has no direction to settle on, and any two implementations part.)
    """
    result = []
    for worker in range(workers):
        lasting = torch.Generator().manual_seed(worker)
        passing = torch.Generator().manual_seed(1000 * step + worker + 1)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = 1e-3 * torch.randn(sum(sizes), generator=passing)
        for piece, shape in zip(flat.split(sizes), shapes, strict=True):
            matrix = piece.view(shape[0], -1)
            for strength in range(min(6, *matrix.shape)):
                u = torch.randn(matrix.shape[0], generator=lasting)
                v = torch.randn(matrix.shape[1], generator=lasting)
                matrix += 0.25**strength * torch.outer(u, v) * (1 + 0.1 * torch.randn((), generator=passing))
        pieces = flat.to(device=device, dtype=dtype).split(sizes)
        result.append({f"w{i}": p.view(shape) for i, (p, shape) in enumerate(zip(pieces, shapes, strict=True))})
    return result


def run(codec: Any, tensors: list[dict[str, Tensor]], states: list[State], fast: bool) -> list[dict[str, Tensor]]:
    given = tensors if fast else copy.deepcopy(tensors)
    ends = lockstep([codec.average(t, s, reuse=fast) for t, s in zip(given, states, strict=True)])
    return [end.mean for end in ends]


def close(a: Tensor, b: Tensor, tolerance: float, of: Tensor | None = None) -> None:
    a, b = a.double().cpu(), b.double().cpu()
    size = float((b if of is None else of.double()).norm())
    assert float((a - b).norm()) <= tolerance * size + 1e-30, f"off by {(a - b).norm() / size:.2e}"


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("rank", [1, 2, 4, 16])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("device", DEVICES)
def test_fifty_steps_equal_the_plain_composition(device, shapes, rank, rounds):
    codec = ErrorFeedback(LowRank(rank, min_compression=0, rounds=rounds))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    for step in range(50):
        tensors = inputs(shapes, 2, step, device, torch.float32)
        expected = run(codec, tensors, plain, fast=False)
        got = run(codec, copy.deepcopy(tensors), fast, fast=True)
        for name in expected[0]:
            assert torch.equal(got[0][name], got[1][name])
            close(got[0][name], expected[0][name], 1e-5, of=expected[0][name])
            close(fast[0]["residual"][name], plain[0]["residual"][name], 1e-5, of=tensors[0][name])
        # Where directions are equally strong two right implementations part: each step begins from one place.
        for a, b in zip(fast, plain, strict=True):
            _copy(a, b)
    assert any(key.startswith("_fused") for key in fast[0]["inner"]) == (device == "cuda")


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("rank", [8, 32, 64])
@pytest.mark.parametrize("device", DEVICES)
def test_high_ranks_equal_the_plain_composition(device, rank, rounds):
    shapes = [(136, 200), (200, 136), (301, 75), (75, 130, 3)]
    codec = ErrorFeedback(LowRank(rank, min_compression=0, rounds=rounds))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    for step in range(8):
        tensors = inputs(shapes, 2, step, device, torch.float32)
        expected = run(codec, tensors, plain, fast=False)
        got = run(codec, copy.deepcopy(tensors), fast, fast=True)
        for name in expected[0]:
            assert torch.equal(got[0][name], got[1][name])
            close(got[0][name], expected[0][name], 1e-5, of=tensors[0][name])
            close(fast[0]["residual"][name], plain[0]["residual"][name], 1e-5, of=tensors[0][name])
        for a, b in zip(fast, plain, strict=True):
            _copy(a, b)


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("device", DEVICES)
def test_matrices_and_the_rest_in_one_exchange_equal_the_plain_composition(device, rounds):
    shapes = [(96, 64), (64,), (40, 37), (37,), (1500,), (64, 96), (3, 2)]
    codec = ByShape(ErrorFeedback(LowRank(2, min_compression=1, rounds=rounds)))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    memory = inputs([(1 if len(s) < 2 else s[0], *s[-1:]) for s in shapes], 2, 0, device, torch.float32)
    for step in range(6):
        fresh = inputs([(1 if len(s) < 2 else s[0], *s[-1:]) for s in shapes], 2, step, device, torch.float32)
        for into, new in zip(memory, fresh, strict=True):  # as DDP does: the same tensors, other numbers
            for name, t in into.items():
                t.copy_(new[name])
        if step == 3:
            memory[1]["w1"].flatten()[0] = float("nan")  # no matrix, and yet the step is void as a whole
        kept = copy.deepcopy(fast[0].get("codec", {}).get("residual"))
        expected = run(codec, memory, plain, fast=False)
        got = run(codec, memory, fast, fast=True)
        for name, mean in expected[0].items():
            if step == 3:
                assert not got[0][name].isfinite().any()
                continue
            assert torch.equal(got[0][name], got[1][name])
            close(got[0][name], mean, 1e-4, of=mean)
        if step == 3:
            assert all(torch.equal(fast[0]["codec"]["residual"][name], x) for name, x in kept.items())
    assert ("_bound" in fast[0]) == (device == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("rounds", ["two", "alternating"])
def test_as_a_graph_the_kernels_on_cuda_do_the_same(monkeypatch, rounds):
    from laconic.kernels.cuda import launches  # needs Triton

    codec = ByShape(ErrorFeedback(LowRank(4, min_compression=0, rounds=rounds)))
    one_by_one: list[State] = [{}]
    graphs: list[State] = [{}]
    for step in range(8):
        tensors = inputs([*SHAPES["odd"], *SHAPES["repeated"]], 1, step, "cuda", torch.float32)
        monkeypatch.setattr(launches, "GRAPHS", False)
        expected = run(codec, copy.deepcopy(tensors), one_by_one, fast=True)[0]
        monkeypatch.setattr(launches, "GRAPHS", True)
        got = run(codec, tensors, graphs, fast=True)[0]
        for name, mean in expected.items():
            assert torch.equal(got[name], mean)
    group = next(iter(graphs[0]["codec"]["inner"]["_fused"].values()))
    assert all(sequence._graph is not None for sequence in group._sequences.values())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("graphs", [True, False])
def test_a_caller_may_capture_the_kernels_in_a_graph_of_its_own(monkeypatch, graphs):
    from laconic.kernels.cuda import launches  # needs Triton

    monkeypatch.setattr(launches, "GRAPHS", graphs)
    codec = ByShape(ErrorFeedback(LowRank(4, min_compression=0, rounds="two")))
    tensors = inputs(SHAPES["odd"], 1, 0, "cuda", torch.float32)
    given = copy.deepcopy(tensors[0])
    captured: list[State] = [{}]
    eager: list[State] = [{}]

    def step() -> None:
        torch._foreach_copy_(list(tensors[0].values()), list(given.values()))
        run(codec, tensors, captured, fast=True)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(4):
        graph.replay()
    for _ in range(7):
        expected = copy.deepcopy(given)
        run(codec, [expected], eager, fast=True)
    for name, mean in expected.items():
        close(tensors[0][name], mean, 1e-5)


def _copy(into: State, state: State) -> None:
    for name, residual in state["residual"].items():
        into["residual"][name].copy_(residual)
    for key in ("p", "q"):
        for name, factor in state["inner"].get(key, {}).items():
            if name in into["inner"].get(key, {}):
                into["inner"][key][name].copy_(orthonormal(factor))


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_in_float64_fifty_steps_at_a_stretch_equal_the_plain_composition(shapes, rounds):
    codec = ErrorFeedback(LowRank(3, min_compression=0, rounds=rounds))
    plain: list[State] = [{}, {}]
    fast: list[State] = [{}, {}]
    for step in range(50):
        tensors = inputs(shapes, 2, step, "cpu", torch.float64)
        expected = run(codec, tensors, plain, fast=False)
        got = run(codec, tensors, fast, fast=True)
        for name in expected[0]:
            close(got[0][name], expected[0][name], 1e-7)


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_what_was_sent_and_what_is_owed_is_all_there_was(device, dtype, rounds):
    if device == "cpu" and dtype != torch.float32:
        pytest.skip("in-place products are for fp32; the plain composition serves, and the laws test it")
    shapes = SHAPES["odd"]
    codec = ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0))
    states: list[State] = [{}, {}, {}]
    truth: dict[str, Any] = {}
    delivered: dict[str, Any] = {}
    for step in range(20):
        tensors = inputs(shapes, 3, step, device, dtype)
        for name in tensors[0]:
            truth[name] = truth.get(name, 0) + sum(t[name].double() for t in tensors) / 3
        means = run(codec, tensors, states, fast=True)
        for name, mean in means[0].items():
            delivered[name] = delivered.get(name, 0) + mean.double()
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for name in truth:
        owed = sum(s["residual"][name].double() for s in states) / 3
        assert states[0]["residual"][name].dtype == torch.float32
        close(delivered[name] + owed, truth[name], tolerance)


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("device", DEVICES)
def test_zeros_dependent_columns_and_extremes_stay_finite(device, rounds):
    codec = ErrorFeedback(LowRank(4, rounds=rounds, min_compression=0))
    states: list[State] = [{}, {}]
    shapes = [(40, 48), (48, 40), (64, 33)]
    for step in range(12):
        tensors = inputs(shapes, 2, step, device, torch.float32)
        for t in tensors:
            if step % 4 == 0:
                t["w0"].zero_()
            if step % 3 == 0:
                t["w1"].copy_(torch.outer(t["w1"][:, 0], t["w1"][0]))  # of rank 1
            t["w2"].mul_(10.0 ** (20 if step % 2 else -20))
        for mean in run(codec, tensors, states, fast=True):
            assert all(x.isfinite().all() for x in mean.values())
        assert all(x.isfinite().all() for s in states for x in s["residual"].values())


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_zero_gradient_is_delivered_as_zero_and_forgets_nothing(device, rounds):
    codec = ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0))
    states: list[State] = [{}]
    run(codec, inputs([(40, 48)], 1, 0, device, torch.float32), states, fast=True)
    states[0]["residual"]["w0"].zero_()
    tensors = inputs([(40, 48)], 1, 1, device, torch.float32)
    tensors[0]["w0"].zero_()
    means = run(codec, tensors, states, fast=True)
    assert not means[0]["w0"].any()
    q = states[0]["inner"]["q"]["w0"]
    assert q.isfinite().all()
    assert q.any()


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("device", DEVICES)
def test_one_overflow_leaves_residuals_and_factors_as_they_were(device, bad, rounds):
    codec = ErrorFeedback(LowRank(2, rounds=rounds, min_compression=0))
    states: list[State] = [{}, {}]
    for step in range(3):
        run(codec, inputs(SHAPES["odd"], 2, step, device, torch.float32), states, fast=True)
    kept = [copy.deepcopy(s["residual"]) for s in states]
    factors = [{n: x.clone() for n, x in s["inner"]["q"].items()} for s in states]
    tensors = inputs(SHAPES["odd"], 2, 3, device, torch.float32)
    tensors[1]["w0"][3, 4] = bad
    means = run(codec, tensors, states, fast=True)
    assert not means[0]["w0"].isfinite().all()
    for s, residual, q in zip(states, kept, factors, strict=True):
        for name in residual:
            assert torch.equal(s["residual"][name], residual[name])
            assert torch.equal(s["inner"]["q"][name], q[name])
    for step in range(4, 7):
        for mean in run(codec, inputs(SHAPES["odd"], 2, step, device, torch.float32), states, fast=True):
            assert all(x.isfinite().all() for x in mean.values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_new_layout_and_a_saved_state_go_on_where_they_were(device):
    codec = ByShape(ErrorFeedback(LowRank(2, min_compression=0)))
    one: list[State] = [{}]
    other: list[State] = [{}]
    for step in range(8):
        whole = inputs(SHAPES["repeated"], 1, step, device, torch.float32)[0]
        halves = copy.deepcopy(whole)
        got = run(codec, [whole], one, fast=True)[0]
        names = list(halves)
        cut = 3 if step < 4 else 5  # DDP laid its buckets out anew
        parts: dict[str, Tensor] = {}
        for some in (names[:cut], names[cut:]):
            parts |= run(codec, [{n: halves[n] for n in some}], other, fast=True)[0]
        if step == 5:
            nest = other[0]["codec"]
            inner = {k: v for k, v in nest["inner"].items() if not k.startswith("_")}
            other = [{"codec": copy.deepcopy({"residual": nest["residual"], "inner": inner}), "rest": {}}]
        for name in names:
            close(parts[name], got[name], 1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_tensors_are_collected_and_averaged_in_place(dtype):
    states: list[State] = [{}, {}]
    for step in range(3):
        shapes = [(7,), (1500,), (1,), (33, 3), (4096,)]
        plain = [{f"v{i}": torch.randn(s, device="cuda").to(dtype) for i, s in enumerate(shapes)} for _ in range(2)]
        given = copy.deepcopy(plain)
        expected = lockstep([Exact().average(t, {}) for t in plain])[0].mean
        ends = lockstep([Exact().average(t, s, reuse=True) for t, s in zip(given, states, strict=True)])
        for name, mean in expected.items():
            assert torch.equal(ends[0].mean[name], mean)
            assert ends[0].mean[name] is given[0][name]
        assert "_collected" in states[0], step


INTERPRETED = """
import sys
import torch
from laconic.codecs import ErrorFeedback, LowRank
from laconic.kernels.cuda.fused import fused_feedback
from laconic.comm.lockstep import lockstep

torch.manual_seed(0)
for rounds in ("two", "alternating"):
    rank, steps = int(sys.argv[1]), int(sys.argv[2])
    codec, state, residual, plain = LowRank(rank, rounds=rounds, min_compression=0), {}, {}, {}
    for step in range(steps):
        given = {"a": torch.randn(70, 92), "b": torch.randn(65, 67)}
        sizes = {name: 1e-5 * t.norm() for name, t in given.items()}
        expected = lockstep([ErrorFeedback(codec).average({n: t.clone() for n, t in given.items()}, plain)])[0].mean
        got = lockstep([fused_feedback(codec, given, residual, state)])[0].mean
        for name in given:
            assert (got[name] - expected[name]).norm() <= sizes[name], (rounds, step, name)
            assert (residual[name] - plain["residual"][name]).norm() <= sizes[name], (rounds, step, name)
"""


@pytest.mark.parametrize(("rank", "steps"), [(1, 3), (3, 3), (16, 2), (64, 2)])
def test_the_kernels_in_tritons_interpreter(rank, steps):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ, TRITON_INTERPRET="1")  # read when Triton is imported: a process of its own
    command = [sys.executable, "-c", INTERPRETED, str(rank), str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
