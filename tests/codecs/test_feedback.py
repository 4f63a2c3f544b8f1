"""ErrorFeedback and ByShape: how wrappers compose, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from laconic.codecs import ByName, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank
from laconic.codecs.feedback import has_feedback, rescale_residuals, return_to_residual
from laconic.exchange import Mean, Peers
from laconic.ledger import Ledger
from tests.laws.world import World, averaged, residuals, tensors


def test_the_next_round_sends_the_residual() -> None:
    codec, state = ErrorFeedback(Cast("bf16")), dict[str, Any]()
    fine = torch.tensor([1.0 + 2**-10])  # 2**-10 is lost in bf16
    means = [float(averaged(codec, [{"x": fine}], [state])[0].mean["x"]) for _ in range(8)]
    assert means[0] == 1
    assert max(means) > 1
    assert sum(means) + float(state["residual"]["x"]) == 8 * float(fine)


def test_feedback_removes_the_bias_over_many_steps() -> None:
    given = tensors("long", names=["odd.weight"])
    truth, errors = given["odd.weight"], {}
    for codec in (LowRank(rank=1), ErrorFeedback(LowRank(rank=1))):
        world = World(codec, 1)
        total = sum(world.average([given])[0].mean["odd.weight"] for _ in range(200))
        errors[type(codec)] = float((torch.as_tensor(total) / 200 - truth).norm() / truth.norm())
    assert errors[ErrorFeedback] < 0.1 < 0.5 < errors[LowRank]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_residuals_are_fp32(dtype: torch.dtype) -> None:
    world = World(ByShape(ErrorFeedback(LowRank(rank=1))), 2)
    world.average(world.inputs("fp32", dtype))
    assert {r.dtype for r in residuals(world.states[0]).values()} == {torch.float32}


@pytest.mark.parametrize("codec", [LowRank(rank=1), LowRank(rank=2, rounds="alternating"), Cast("bf16")], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_rounding_and_the_range_of_half_precision_take_is_sent_later(codec: Codec, dtype: torch.dtype) -> None:
    world = World(ErrorFeedback(codec), 2)
    truth = delivered = torch.zeros(24, 24, dtype=torch.float64)
    largest = 0.0
    for step in range(8):
        inputs = [tensors((step, worker), names=["square.weight"]) for worker in range(2)]
        given = [{"w": (2e4 * each["square.weight"]).clamp(-6e4, 6e4).to(dtype)} for each in inputs]
        truth = truth + sum(each["w"].double() for each in given) / 2
        for each in world.average(given):
            mean = each.mean["w"]
            assert bool(each.finite()) and mean.isfinite().all() and mean.dtype == dtype
        delivered = delivered + mean.double()
        largest = max(largest, float(mean.abs().max()))
    residual = sum(residuals(state)["w"].double() for state in world.states) / 2
    limit = 1e-5 if isinstance(codec, LowRank) else 1e-2  # the messages of Cast are bf16 themselves
    assert (delivered + residual - truth).abs().max() <= limit * truth.abs().max()
    assert largest == 65504 or (dtype, codec) != (torch.float16, LowRank(rank=1)), "fp16 must overflow here"


@pytest.mark.parametrize("codec", [ErrorFeedback(LowRank(rank=1)), LowRank(rank=1)], ids=repr)
def test_inf_stays_inf_in_half_precision(codec: Codec) -> None:
    given = {"w": torch.ones(24, 24, dtype=torch.float16)}
    given["w"][3, 4] = torch.inf
    (end,) = averaged(codec, [given])
    assert not bool(end.finite()) and not end.mean["w"].isfinite().all()


NESTED = ByShape(ErrorFeedback(LowRank(rank=1)), rest=ErrorFeedback(Cast("bf16")))


@pytest.mark.parametrize("reuse", [False, True])
def test_a_mean_that_was_dropped_returns_to_the_residual(reuse: bool) -> None:
    world = World(NESTED, 2, reuse)
    inputs = world.inputs("dropped")
    truth = {name: (inputs[0][name] + inputs[1][name]) / 2 for name in ("square.weight", "bias")}
    means = [end.mean for end in world.average(inputs)]
    dropped = {"bias": means[0]["bias"], "elsewhere": torch.ones(3)}
    kept = residuals(world.states[0])["square.weight"].clone()
    for state in world.states:
        return_to_residual(state, dropped)
        return_to_residual(state, dropped, ok=torch.tensor(False))
    assert torch.equal(residuals(world.states[0])["square.weight"], kept)
    found = [residuals(state)["bias"] for state in world.states]
    torch.testing.assert_close((found[0] + found[1]) / 2, truth["bias"], atol=1e-2, rtol=0)  # means in bf16
    for state, mean in zip(world.states, means, strict=True):
        return_to_residual(state, {"square.weight": mean["square.weight"]}, ok=torch.tensor(True))
    found = [residuals(state)["square.weight"] for state in world.states]
    torch.testing.assert_close((found[0] + found[1]) / 2, truth["square.weight"])


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0)])
def test_residuals_can_be_rescaled(factor: float | torch.Tensor) -> None:
    world = World(NESTED, 1)
    world.average(world.inputs("scaled"))
    state = world.states[0]
    before = {name: t.clone() for name, t in residuals(state).items()}
    q = {name: t.clone() for name, t in state["codec"]["inner"]["q"].items()}
    rescale_residuals(state, factor)
    assert {"square.weight", "bias"} <= before.keys()
    assert all(torch.equal(t, 2 * before[name]) for name, t in residuals(state).items())
    assert all(torch.equal(t, q[name]) for name, t in state["codec"]["inner"]["q"].items())
    rescale_residuals({}, factor)


@pytest.mark.parametrize("subtract", ["sum", "", None, 1])
def test_subtract_must_be_own_or_mean(subtract: Any) -> None:
    with pytest.raises(ValueError) as error:
        ErrorFeedback(Exact(), subtract=subtract)
    assert str(error.value) == (
        f'ErrorFeedback(subtract={subtract!r}): it must be "own" (the paper\'s rule) or "mean" (torch\'s).'
    )


@pytest.mark.parametrize("codec", [LowRank(1), ErrorFeedback(LowRank(2))], ids=repr)
def test_rest_must_accept_every_shape(codec: Codec) -> None:
    with pytest.raises(ValueError) as error:
        ByShape(Exact(), rest=codec)
    assert str(error.value) == (
        f"ByShape(rest={codec}): rest gets what the other codecs decline, "
        "so it must accept every shape, as Exact() and Cast(...) do."
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ErrorFeedback(5), r"ErrorFeedback\(5\)"),  # type: ignore[arg-type]
        (lambda: ErrorFeedback(Exact), r"ErrorFeedback\("),  # type: ignore[arg-type]
        (lambda: ByShape("Exact()"), r"ByShape\('Exact\(\)'"),  # type: ignore[arg-type]
        (lambda: ByShape(Exact(), rest=5), r"ByShape\(.*5"),  # type: ignore[arg-type]
    ],
)
def test_only_codecs_can_be_wrapped(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.parametrize("inner", [ErrorFeedback(Cast("bf16")), ByShape(ErrorFeedback(LowRank(1)))], ids=repr)
def test_nested_feedback_is_refused(inner: Codec) -> None:
    with pytest.raises(ValueError, match="ErrorFeedback"):
        ErrorFeedback(inner)


def test_both_codecs_share_their_rounds() -> None:
    given = {"w": torch.ones(20, 30), "b": torch.ones(7)}
    ledger = Ledger()
    averaged(ByShape(LowRank(rank=1)), [given] * 2, ledger=ledger)
    assert [entry.payload_bytes for entry in ledger.entries] == [4 * (20 + 7), 4 * 30]


def test_messages_of_different_dtype_are_not_joined() -> None:
    given = {"w": torch.ones(20, 30), "b": torch.ones(7)}
    exchange = ByShape(LowRank(rank=1), rest=Cast("bf16")).average(given, {}, Peers(0, 2))
    first = next(exchange)
    assert isinstance(first, Mean)
    second = exchange.send(first.x)
    assert isinstance(second, Mean)
    assert (first.x.dtype, second.x.dtype) == (torch.float32, torch.bfloat16)


def test_a_wide_mean_is_not_joined_with_another() -> None:
    given = {"w": torch.ones(20, 30), "b": torch.ones(7)}
    ledger = Ledger()
    averaged(ByShape(LowRank(rank=1), rest=Exact(wide=True)), [given] * 2, ledger=ledger)
    assert [entry.payload_bytes for entry in ledger.entries] == [4 * 20, 4 * 7, 4 * 30]


@pytest.mark.parametrize("codec", [ErrorFeedback(Cast("bf16")), ByShape(ErrorFeedback(LowRank(rank=1)))])
def test_feedback_is_found_inside_other_codecs(codec: Codec) -> None:
    assert has_feedback(codec) and has_feedback(ByName({"*.embed*": codec}))
    assert not has_feedback(ByName({"*.embed*": Cast("bf16")}))
