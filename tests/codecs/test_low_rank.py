"""LowRank: the numbers of its paper, exactness at full rank, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import laconic
from laconic.codecs import ByShape, ErrorFeedback, LowRank
from laconic.codecs.low_rank import Factors
from tests.laws.world import World, averaged, tensors, true_mean


def resnet18_cifar10() -> dict[str, tuple[int, ...]]:
    """Every parameter of the ResNet18 for CIFAR-10 of arXiv:1905.13727, Appendix F: 3x3 stem, 10 classes."""
    shapes: dict[str, tuple[int, ...]] = {"conv1": (64, 3, 3, 3), "bn1.weight": (64,), "bn1.bias": (64,)}
    inside = 64
    for layer, outside in enumerate((64, 128, 256, 512), start=1):
        for block in range(2):
            name = f"layer{layer}.{block}"
            shapes[f"{name}.conv1"] = (outside, inside, 3, 3)
            shapes[f"{name}.conv2"] = (outside, outside, 3, 3)
            convolutions = 2
            if inside != outside:
                shapes[f"{name}.shortcut"] = (outside, inside, 1, 1)
                convolutions = 3
            for each in range(convolutions):
                shapes |= {f"{name}.bn{each}.weight": (outside,), f"{name}.bn{each}.bias": (outside,)}
            inside = outside
    return shapes | {"fc.weight": (10, 512), "fc.bias": (10,)}


RESNET18 = resnet18_cifar10()
DENSE_BYTES = laconic.sent_bytes(laconic.ddp(), RESNET18)


def test_parameter_counts_equal_the_papers() -> None:
    assert DENSE_BYTES == 4 * 11_173_962
    vectors = {name: shape for name, shape in RESNET18.items() if len(shape) == 1}
    assert laconic.sent_bytes(laconic.ddp(), vectors) / 1024 == pytest.approx(38, abs=0.5)  # its "bias vectors (total)"


@pytest.mark.parametrize(("rank", "compression"), [(1, 243.3), (2, 135.8), (4, 72.1)])
def test_compression_equals_the_papers(rank: int, compression: float) -> None:
    plan = laconic.plan(f"power_sgd(rank={rank}, bits=None)")
    assert round(DENSE_BYTES / laconic.sent_bytes(plan, RESNET18), 1) == compression


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_alternating_sends_half_of_the_factors(rank: int) -> None:
    matrices = {name: shape for name, shape in RESNET18.items() if len(shape) > 1}
    two, alternating = (
        laconic.sent_bytes(laconic.power_sgd(rank=rank, bits=None, rounds=rounds), matrices)
        for rounds in ("two", "alternating")
    )
    assert alternating == two / 2
    rows_and_columns = sum(shape[0] + torch.Size(shape[1:]).numel() for shape in matrices.values())
    assert two == 4 * rank * rows_and_columns


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 7), (7, 1), (1, 1), (4, 2, 3), (5, 1, 3, 3)])
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("more", [0, 3])
def test_at_full_rank_the_mean_is_exact(shape: tuple[int, ...], workers: int, feedback: bool, more: int) -> None:
    rank = min(shape[0], torch.Size(shape[1:]).numel()) + more
    low_rank = LowRank(rank, min_compression=0)
    world = World(ErrorFeedback(low_rank) if feedback else low_rank, workers)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs = [{"w": torch.randn(shape, generator=generator)} for _ in range(workers)]
        mean = world.average(inputs)[0].mean["w"]
        torch.testing.assert_close(mean.double(), true_mean(inputs)["w"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("codec", "shape", "accepted"),
    [
        (LowRank(1), (), False),
        (LowRank(1), (1000,), False),
        (LowRank(1), (0, 100), False),
        (LowRank(1), (100, 0), False),
        (LowRank(1), (4, 4), False),  # 8 numbers instead of 16: exactly 2 times smaller
        (LowRank(1), (5, 5), True),
        (LowRank(1, min_compression=3), (5, 5), False),
        (LowRank(2), (100, 100), True),
        (LowRank(25), (100, 100), False),
        (LowRank(25, min_compression=1), (100, 100), True),
        (LowRank(100, min_compression=0), (3, 3), True),
        (LowRank(2), (64, 3, 3, 3), True),
    ],
)
def test_matrices_that_would_not_shrink_enough_are_declined(
    codec: LowRank, shape: tuple[int, ...], accepted: bool
) -> None:
    assert codec.accepts(torch.Size(shape)) is accepted


@pytest.mark.parametrize("shape", [(), (7,), (0, 4)])
def test_tensors_that_are_not_matrices_are_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError) as error:
        averaged(LowRank(rank=2), [{"bias": torch.zeros(shape)}])
    assert str(error.value) == (
        f"LowRank(rank=2) was given 'bias' of shape {list(shape)}: it accepts only matrices. "
        "Wrap it in ByShape(LowRank(rank=2)), which sends everything else exactly."
    )


def test_empty_input_needs_no_collective() -> None:
    (end,) = averaged(LowRank(rank=2), [{}])
    assert end.mean == end.own() == {}
    assert bool(end.finite())


def test_the_seed_decides_the_first_factor() -> None:
    given = tensors("seed", names=["odd.weight"])

    def first(seed: int) -> torch.Tensor:
        return averaged(LowRank(rank=1, seed=seed), [given])[0].mean["odd.weight"]

    assert torch.equal(first(0), first(0))
    assert not torch.allclose(first(0), first(1))


def test_equal_shapes_start_from_different_factors() -> None:
    given = {name: torch.eye(30) for name in ("a", "b")}
    mean = averaged(LowRank(rank=1), [given])[0].mean
    assert not torch.allclose(mean["a"], mean["b"])


def test_arithmetic_is_fp32_for_half_precision() -> None:
    codec = LowRank(rank=1)
    state: dict[str, Any] = {}
    averaged(codec, [{"w": torch.full((64, 64), 300.0, dtype=torch.float16)}], [state])
    assert state["q"]["w"].dtype == torch.float32
    assert state["q"]["w"].abs().max() > 2000  # 300 * 64 / sqrt(64), whose squares overflow in fp16


def test_fp16_matrices_near_overflow_are_exact() -> None:
    given = {"w": torch.full((64, 64), 60000.0, dtype=torch.float16)}
    (end,) = averaged(LowRank(rank=1), [given])
    torch.testing.assert_close(end.mean["w"].float(), given["w"].float(), rtol=1e-3, atol=0)


def test_rows_and_columns_are_those_of_the_logical_shape() -> None:
    x = tensors("conv", names=["conv.weight"])["conv.weight"]
    assert not x.is_contiguous()
    for given in (x, x.contiguous()):
        means = averaged(LowRank(rank=2), [{"w": given}])[0].mean["w"]
        flat = x.reshape(16, -1)
        assert torch.linalg.matrix_rank(means.reshape(16, -1)) == 2
        assert (means.reshape(16, -1) - flat).norm() < flat.norm()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, r"LowRank\(rank=0\): rank must be at least 1. To send all, use Exact\(\)."),
        ({"rank": -3}, r"LowRank\(rank=-3\): rank must be at least 1. To send all, use Exact\(\)."),
        (
            {"rank": 1, "min_compression": -1},
            r"LowRank\(min_compression=-1\): it must not be negative. To compress all, use 0.",
        ),
        ({"rank": 1, "rounds": "three"}, r"LowRank\(rounds='three'\): rounds must be \"two\" or \"alternating\"."),
        ({"rank": 1, "rounds": None}, r"LowRank\(rounds=None\): rounds must be \"two\" or \"alternating\"."),
        (
            {"rank": 1, "rounds": "alternating", "warm_start": False},
            r"LowRank\(rounds=\"alternating\", warm_start=False\): .* reuses the other .* Use rounds=\"two\"",
        ),
        *(
            (
                values,
                rf"LowRank\({word}=.*must.*",
            )
            for word, values in [
                ("rank", {"rank": 2.5}),
                ("rank", {"rank": "4"}),
                ("rank", {"rank": None}),
                ("rank", {"rank": True}),
                ("rank", {"rank": float("inf")}),
                ("min_compression", {"rank": 1, "min_compression": float("nan")}),
                ("min_compression", {"rank": 1, "min_compression": float("inf")}),
                ("min_compression", {"rank": 1, "min_compression": "2"}),
                ("seed", {"rank": 1, "seed": [1]}),
                ("seed", {"rank": 1, "seed": 0.5}),
                ("warm_start", {"rank": 1, "warm_start": "no"}),
            ]
        ),
    ],
)
def test_invalid_arguments_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LowRank(**values)


def test_the_view_of_the_state_creates_keys_only_on_use() -> None:
    state: dict[str, Any] = {}
    factors = Factors(state)
    assert (factors.turn("w"), factors.sends_q("w"), state) == (0, False, {})
    factors.advance(["w"])
    assert (factors.turn("w"), factors.sends_q("w"), factors.sends_q("other")) == (1, True, False)
    assert (factors.in_step(["w"]), factors.in_step(["w", "other"])) == (True, False)
    factors.p["w"], factors.q["w"] = torch.ones(3, 1), torch.ones(2, 1)
    factors.cache("prepared")["key"] = "not saved"
    assert list(state) == ["turn", "p", "q", "_prepared"]
    assert Factors(state).cache("prepared") == {"key": "not saved"}


def test_by_shape_routes_by_shape() -> None:
    given = tensors("route", names=["square.weight", "narrow.weight", "bias", "gain"])
    (end,) = averaged(ByShape(LowRank(rank=1)), [given])
    for name in ("narrow.weight", "bias", "gain"):
        assert torch.equal(end.mean[name], given[name])
    assert torch.linalg.matrix_rank(end.mean["square.weight"]) == 1
