"""The Triton kernels: all of them in the interpreter; CUDA graphs and small tensors on a GPU (`pytest -m gpu`)."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch

from laconic.codecs import ByShape, ErrorFeedback, Exact, LowRank
from laconic.exchange import State
from tests.kernels.gradients import GPU, SHAPES, close, inputs, run
from tests.laws.world import averaged


def on_gpu(test):
    """Run a test on a GPU only."""
    for mark in GPU:
        test = mark(test)
    return test


@on_gpu
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


@on_gpu
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


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_small_tensors_are_collected_and_averaged_in_place(dtype):
    states: list[State] = [{}, {}]
    for step in range(3):
        shapes = [(7,), (1500,), (1,), (33, 3), (4096,)]
        plain = [{f"v{i}": torch.randn(s, device="cuda").to(dtype) for i, s in enumerate(shapes)} for _ in range(2)]
        given = copy.deepcopy(plain)
        expected = averaged(Exact(), plain)[0].mean
        ends = averaged(Exact(), given, states, reuse=True)
        for name, mean in expected.items():
            assert torch.equal(ends[0].mean[name], mean)
            assert ends[0].mean[name] is given[0][name]
        assert "_collected" in states[0], step


INTERPRETED = """
import sys
import torch
from laconic.codecs import ByShape, ErrorFeedback, LowRank
from laconic.codecs.low_rank import Factors
from laconic.comm.lockstep import lockstep
from laconic.exchange import Mean, Peers
from laconic.kernels.cuda.collect import Collection
from laconic.kernels.cuda.fused import bind
from tests.laws.world import averaged

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
        expected = averaged(ByShape(ErrorFeedback(codec)), [copies], [plain])[0].mean
        end = lockstep([bind(codec, matrices, vectors, given, residual, factors).exchange(Peers(0, 1))])[0]
        if step == steps:  # the whole step is void
            assert not bool(end.finite()) and not any(t.isfinite().any() for t in end.mean.values())
            assert all(torch.equal(residual[name], t) for name, t in kept.items())
            continue
        for name, t in matrices.items():
            limit = 1e-5 * copies[name].norm()
            assert (end.mean[name] - expected[name]).norm() <= limit, (rounds, step, name)
            assert (residual[name] - plain["codec"]["residual"][name]).norm() <= limit, (rounds, step, name)
        assert bool(end.finite()) and all(torch.equal(end.mean[name], expected[name]) for name in vectors)

    for dtype in (torch.float16, torch.bfloat16):  # what the gradient's dtype cannot hold goes into the residual
        given, factors = {"a": torch.full((70, 92), 6e4, dtype=dtype)}, Factors({})
        given["a"][::2] *= 0.3
        residual = {"a": torch.full((70, 92), 3e4)}
        truth = given["a"].float() + residual["a"]
        end = lockstep([bind(codec, given, {}, given, residual, factors).exchange(Peers(0, 1))])[0]
        assert bool(end.finite()) and given["a"].isfinite().all() and given["a"].dtype == dtype
        assert (given["a"].float() + residual["a"] - truth).abs().max() <= 1e-5 * truth.abs().max(), (rounds, dtype)
        assert given["a"].max() == 65504 or (rounds, dtype) != ("two", torch.float16)

    for finite in (False, True):  # of all exchanges of the step
        given, residual, factors = {"a": torch.randn(70, 92)}, {}, Factors({})
        for step in range(3):
            exchange = bind(codec, given, {}, given, residual, factors).exchange(Peers(0, 1))
            before = [t.clone() for t in (residual["a"], factors.p["a"], factors.q["a"])]
            request = next(exchange)
            while isinstance(request, Mean):
                request = exchange.send(request.x)
            try:
                exchange.send(torch.tensor(finite or step == 0))
            except StopIteration as stop:
                assert bool(stop.value.finite()) == (finite or step == 0)
            after = (residual["a"], factors.p["a"], factors.q["a"])
            same = [torch.equal(a, b) for a, b in zip(after, before)]
            assert all(same) if not finite and step else not same[0], (rounds, finite, step, same)
            assert given["a"].isfinite().all()  # its own messages were finite

small = {name: torch.randn(size) for name, size in (("a", 3), ("b", 1025), ("c", 1))}
collection = Collection(small)
flat = collection.gather(small)
assert torch.equal(flat, torch.cat(list(small.values())))
collection.scatter(2 * flat)
assert torch.equal(2 * flat, torch.cat(list(small.values())))
"""


@pytest.mark.parametrize(
    ("rank", "steps"),
    [
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(3, 2), (1, 3)]),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [(16, 2), (64, 2)]),
    ],
)
def test_the_kernels_in_tritons_interpreter(rank, steps):
    pytest.importorskip("triton", reason="Triton is not installed")
    environment = dict(os.environ, TRITON_INTERPRET="1")  # Triton reads it at import, hence a new process
    command = [sys.executable, "-c", INTERPRETED, str(rank), str(steps)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-3000:]
