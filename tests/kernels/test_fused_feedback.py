"""The fused paths against the plain composition that they replace: `ErrorFeedback(LowRank)`.

The tests run the in-place products on the CPU, the Triton kernels on a GPU (`pytest -m gpu`), and the Triton kernels in
Triton's interpreter if it is installed.
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


def each_shape(quick: Sequence[str]) -> pytest.MarkDecorator:
    """Test all shapes; those that are not `quick` are marked slow."""
    marks = {name: [] if name in quick else [pytest.mark.slow] for name in SHAPES}
    return pytest.mark.parametrize("shapes", [pytest.param(SHAPES[n], id=n, marks=marks[n]) for n in SHAPES])


def each_rank(ranks: Sequence[int], quick: Sequence[int]) -> pytest.MarkDecorator:
    """Test all ranks; those that are not `quick` are marked slow."""
    return pytest.mark.parametrize(
        "rank", [pytest.param(rank, marks=[] if rank in quick else [pytest.mark.slow]) for rank in ranks]
    )


def inputs(
    shapes: Sequence[tuple[int, ...]], workers: int, step: int, device: str, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Return gradients in one flat bucket for each worker: fixed directions with a ratio of 4, and a little noise.

    On noise alone power iteration does not converge, and any two implementations diverge.
    """
    result = []
    for worker in range(workers):
        fixed = torch.Generator().manual_seed(worker)
        noise = torch.Generator().manual_seed(1000 * step + worker + 1)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = 1e-3 * torch.randn(sum(sizes), generator=noise)
        for piece, shape in zip(flat.split(sizes), shapes, strict=True):
            matrix = piece.view(shape[0], -1)
            for power in range(min(6, *matrix.shape)):
                u = torch.randn(matrix.shape[0], generator=fixed)
                v = torch.randn(matrix.shape[1], generator=fixed)
                matrix += 0.25**power * torch.outer(u, v) * (1 + 0.1 * torch.randn((), generator=noise))
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
@each_rank([1, 2, 4, 16], quick=[1, 4])
@each_shape(quick=["odd", "repeated"])
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
        # Two right implementations diverge where singular values are equal, so each step starts from the same state.
        for a, b in zip(fast, plain, strict=True):
            _copy(a, b)
    assert any(key.startswith("_fused") for key in fast[0]["inner"]) == (device == "cuda")


@pytest.mark.parametrize("rounds", ["two", "alternating"])
@each_rank([8, 32, 64], quick=[32])
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
        for into, new in zip(memory, fresh, strict=True):  # as in DDP: the same tensors with new values
            for name, t in into.items():
                t.copy_(new[name])
        if step == 3:
            memory[1]["w1"].flatten()[0] = float("nan")  # not a matrix, but the whole step is void
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
    assert ("_bound" in fast[0]["codec"]["inner"]) == (device == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("rounds", ["two", "alternating"])
def test_cuda_graphs_give_the_same_bits(monkeypatch, rounds):
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
    bucket = next(iter(graphs[0]["codec"]["inner"]["_fused"].values()))
    assert all(sequence._graph is not None for sequence in bucket._sequences.values())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU here")
@pytest.mark.parametrize("graphs", [True, False])
def test_the_kernels_can_be_captured_in_the_callers_graph(monkeypatch, graphs):
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

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
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
@each_shape(quick=["repeated"])
def test_fifty_consecutive_steps_in_float64_equal_the_plain_composition(shapes, rounds):
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
def test_means_plus_mean_residuals_equal_the_sum_of_inputs(device, dtype, rounds):
    if device == "cpu" and dtype != torch.float32:
        pytest.skip("the CPU path is for fp32; other dtypes use the plain composition, which the laws test")
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
        residual = sum(s["residual"][name].double() for s in states) / 3
        assert states[0]["residual"][name].dtype == torch.float32
        close(delivered[name] + residual, truth[name], tolerance)


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
def test_a_zero_gradient_gives_zero_and_keeps_the_factors(device, rounds):
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
def test_a_nonfinite_step_does_not_change_residuals_and_factors(device, bad, rounds):
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
def test_a_new_bucket_layout_and_a_restored_state_continue_the_run(device):
    codec = ByShape(ErrorFeedback(LowRank(2, min_compression=0)))
    one: list[State] = [{}]
    other: list[State] = [{}]
    for step in range(8):
        whole = inputs(SHAPES["repeated"], 1, step, device, torch.float32)[0]
        halves = copy.deepcopy(whole)
        got = run(codec, [whole], one, fast=True)[0]
        names = list(halves)
        cut = 3 if step < 4 else 5  # a new layout of DDP's buckets
        parts: dict[str, Tensor] = {}
        for some in (names[:cut], names[cut:]):
            parts |= run(codec, [{n: halves[n] for n in some}], other, fast=True)[0]
        if step == 5:
            saved = other[0]["codec"]
            inner = {k: v for k, v in saved["inner"].items() if not k.startswith("_")}
            other = [{"codec": copy.deepcopy({"residual": saved["residual"], "inner": inner}), "rest": {}}]
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
from laconic.codecs import ByShape, ErrorFeedback, LowRank
from laconic.codecs.low_rank_state import Factors
from laconic.comm.lockstep import lockstep
from laconic.kernels.cuda.collect import Collection
from laconic.kernels.cuda.fused import bind

torch.manual_seed(0)
rank, steps = int(sys.argv[1]), int(sys.argv[2])
for rounds in ("two", "alternating"):
    codec = LowRank(rank, rounds=rounds, min_compression=0)
    residual, plain, factors = {}, {}, Factors({})
    for step in range(steps + 1):
        matrices = {"a": torch.randn(70, 92), "b": torch.randn(65, 67)}
        vectors = {"c": torch.randn(1500), "d": torch.randn(7)}
        given = matrices | vectors
        copies = {name: t.clone() for name, t in given.items()}
        kept = {name: t.clone() for name, t in residual.items()}
        if step == steps:
            copies["c"][-1] = vectors["c"][-1] = float("nan")
        expected = lockstep([ByShape(ErrorFeedback(codec)).average(copies, plain)])[0].mean
        end = lockstep([bind(codec, matrices, vectors, given, residual, factors).exchange()])[0]
        if step == steps:  # the whole step is void
            assert not bool(end.finite()) and not any(t.isfinite().any() for t in end.mean.values())
            assert all(torch.equal(residual[name], t) for name, t in kept.items())
            continue
        for name, t in matrices.items():
            limit = 1e-5 * copies[name].norm()
            assert (end.mean[name] - expected[name]).norm() <= limit, (rounds, step, name)
            assert (residual[name] - plain["codec"]["residual"][name]).norm() <= limit, (rounds, step, name)
        assert bool(end.finite()) and all(torch.equal(end.mean[name], expected[name]) for name in vectors)

small = {name: torch.randn(size) for name, size in (("a", 3), ("b", 1025), ("c", 1))}
collection = Collection(small)
flat = collection.gather(small)
assert torch.equal(flat, torch.cat(list(small.values())))
collection.scatter(2 * flat)
assert torch.equal(2 * flat, torch.cat(list(small.values())))
"""


@pytest.mark.parametrize(
    ("rank", "steps"), [(3, 2), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(1, 3), (16, 2), (64, 2)])]
)
def test_the_kernels_in_tritons_interpreter(rank, steps):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ, TRITON_INTERPRET="1")  # Triton reads it at import, hence a new process
    command = [sys.executable, "-c", INTERPRETED, str(rank), str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
