"""The codecs that the laws test, and how results are compared. To add a codec, add it to `CODECS`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from laconic.algorithms.ddp_comm_hooks.powerSGD_hook import Batched
from laconic.codecs import ByName, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, TopDCT, TopK
from laconic.exchange import Averaged
from tests.laws.world import World

QUICK: list[Codec] = [
    Exact(),  # exact × no wrapper
    Cast("bf16"),  # cast × no wrapper
    ByShape(LowRank(rank=1), rest=Exact(wide=True)),  # two rounds × routing to a wide mean; rank 1 × no feedback
    ByShape(ErrorFeedback(LowRank(rank=2))),  # two rounds × feedback inside routing, as in power_sgd(bits=None)
    ByShape(ErrorFeedback(LowRank(rank=2, rounds="alternating"), subtract="mean")),  # alternating × torch's feedback
    ByShape(ErrorFeedback(LowRank(rank=2, bits=4)), rest=ErrorFeedback(Quantized(4))),  # 4 bits × factors: power_sgd()
    ErrorFeedback(Quantized(2, block=8)),  # 2 bits × feedback × small blocks
    ByShape(ErrorFeedback(TopK(0.1, chunk=64, bits=2)), rest=ErrorFeedback(Quantized(4))),  # sparse × 2 bits × feedback
    ErrorFeedback(TopDCT(0.1, chunk=16), decay=0.99),  # DCT × 4 bits × feedback that forgets: demo()
    Batched(ErrorFeedback(LowRank(rank=1))),  # batched × feedback
]
"""One codec of each kind. The tests of all others are marked slow."""
CODECS: list[Codec] = [
    *QUICK,
    ErrorFeedback(Exact()),  # exact × feedback: no residual
    ErrorFeedback(Cast("fp16")),  # cast × feedback
    LowRank(rank=2),  # two rounds × no routing
    LowRank(rank=1, rounds="alternating", min_compression=0),  # alternating × no routing × all matrices
    ByShape(LowRank(rank=4, warm_start=False, seed=7)),  # cold start × routing × a rank above some matrices
    ErrorFeedback(LowRank(rank=1)),  # two rounds × feedback × no routing
    ByShape(ErrorFeedback(LowRank(rank=4, rounds="alternating", min_compression=0))),  # alternating × feedback
    ByShape(ErrorFeedback(LowRank(rank=2, warm_start=False)), rest=Cast("bf16")),  # cold start × feedback; a cast rest
    ErrorFeedback(ByShape(LowRank(rank=2, rounds="alternating"), rest=Cast("bf16"))),  # alternating × feedback outside
    ErrorFeedback(ByShape(LowRank(rank=2))),  # two rounds × feedback outside routing
    ByShape(LowRank(rank=2, bits=8)),  # 8 bits × factors × no feedback
    ByShape(ErrorFeedback(LowRank(rank=1, bits=2, rounds="alternating"))),  # 2 bits × factors × alternating
    Quantized(8),  # 8 bits × no feedback
    Quantized(4, rounding="stochastic"),  # 4 bits × stochastic × no feedback
    ErrorFeedback(Quantized(4)),  # 4 bits × feedback: quantized_ddp()
    ErrorFeedback(Quantized(2)),  # 2 bits × feedback: deltas
    ErrorFeedback(Quantized(1, block=64)),  # 1 bit × feedback × blocks of another size
    ErrorFeedback(Quantized(8), decay=0.9),  # 8 bits × feedback that forgets
    ErrorFeedback(Quantized(4, block=16, rounding="stochastic")),  # stochastic × feedback × small blocks
    ByShape(TopK(0.1, chunk=64)),  # sparse × all bits × no feedback
    ErrorFeedback(ByShape(TopK(0.1, chunk=64), rest=Quantized(4))),  # sparse × feedback outside routing
    TopDCT(0.25, bits=None),  # DCT × all bits × no feedback
    ErrorFeedback(TopDCT(0.05, chunk=7, bits=8)),  # DCT × 8 bits × feedback × uneven blocks
    ErrorFeedback(ByShape(LowRank(rank=1), rest=TopDCT(0.1, bits=2))),  # DCT × 2 bits × routing
    # routing by name × one codec of each kind
    ByName({"*.weight": ErrorFeedback(LowRank(rank=1)), "b*": Cast("bf16")}, rest=ErrorFeedback(Quantized(8))),
]
"""Chosen by pairs: each comment says which pairs of features its codec adds to those above it."""
FEW_BITS = [codec for codec in CODECS if any(word in repr(codec) for word in ("Quantized", "bits=", "TopK", "TopDCT"))]
"""Codecs that round numbers to few bits, or drop some: even for vectors, and by shards, which one worker does not."""
TENSOR_BY_TENSOR = [codec for codec in CODECS if "Batched" not in repr(codec)]
"""Codecs that encode each tensor by itself. `Batched` makes one matrix of all tensors."""
FEEDBACK = [codec for codec in CODECS if "ErrorFeedback" in repr(codec)]
PLAIN_LOW_RANK = [
    codec for codec in TENSOR_BY_TENSOR if "LowRank" in repr(codec) and codec not in [*FEEDBACK, *FEW_BITS]
]
WARM = [codec for codec in PLAIN_LOW_RANK if "warm_start=False" not in repr(codec)]
FUSED = [codec for codec in CODECS if "ErrorFeedback(codec=LowRank" in repr(codec) and "subtract" not in repr(codec)]
"""Codecs with a fused path if the input may be overwritten; it equals the plain code up to rounding."""
COLD = [codec for codec in CODECS if "warm_start=False" in repr(codec)]

WORLDS = [(1, torch.float16), (2, torch.bfloat16), (3, torch.float64), (4, torch.float32)]
each_world = pytest.mark.parametrize(("workers", "dtype"), WORLDS, ids=lambda x: str(x).removeprefix("torch."))
half_and_single = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)


def each(codecs: Sequence[Codec]) -> pytest.MarkDecorator:
    """Test a law on each codec."""
    return pytest.mark.parametrize("codec", [case(codec, repr(codec)) for codec in codecs])


def each_path(codecs: Sequence[Codec]) -> pytest.MarkDecorator:
    """Test a law on each codec, and also on the fused path of those that have one."""
    ways = [(codec, reuse) for codec in codecs for reuse in ([False, True] if codec in FUSED else [False])]
    cases = [case(codec, f"{codec}{'-reuse' if reuse else ''}", reuse) for codec, reuse in ways]
    return pytest.mark.parametrize(("codec", "reuse"), cases)


def case(codec: Codec, name: str, *values: object) -> Any:
    """Return one case of a test, marked slow unless its codec is in `QUICK`."""
    return pytest.param(codec, *values, id=name, marks=[] if codec in QUICK else [pytest.mark.slow])


RANK_DEFICIENT = {"deficient.weight", "one_row.weight"}
"""Matrices of lower rank than their factors: rounding decides how these are completed, so results may differ."""


def rounding(codec: Codec, dtype: torch.dtype) -> float:
    """Return the relative error of one rounding in the coarsest dtype involved."""
    coarse = {"bf16": torch.bfloat16, "fp16": torch.float16}
    types = [dtype, *(each for word, each in coarse.items() if word in repr(codec))]
    return max(torch.finfo(each).eps for each in types)


def subtracts(codec: Codec) -> str:
    """Return what a codec with feedback subtracts: its own part, or the mean."""
    return "mean" if "subtract='mean'" in repr(codec) else "own"


def assert_close(got: Tensor, expected: Tensor, relative: float, scale: Tensor | None = None) -> None:
    """Compare within `relative` of the largest magnitude: a zero tensor must be exactly zero."""
    largest = (expected if scale is None else scale).abs().max().item() if expected.numel() else 0.0
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=relative * largest)


def run(world: World, steps: Sequence[object], dtype: torch.dtype = torch.float32) -> list[Averaged]:
    """Run several steps on new tensors and return the results of worker 0."""
    return [world.average(world.inputs(step, dtype))[0] for step in steps]
