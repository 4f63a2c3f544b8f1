"""Plans that are named by a target of bytes: what they become, on models of many kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import pytest
import torch
from torch import nn

import laconic
from laconic import (
    ByShape,
    ErrorFeedback,
    Every,
    Groups,
    Plan,
    Quantized,
    Streaming,
    ddp,
    frugal,
    power_sgd,
    quantized_ddp,
    sent_bytes,
    streaming_diloco,
)
from laconic.cost import Named, cycle_of, facts_of, planned
from laconic.ledger import crossing_bytes
from laconic.plans.plan import Plan as PlanClass

Shapes = Mapping[str, tuple[int, ...]]


def _resnet() -> nn.Module:
    """A convolutional network whose buffers are 1.5 % of its parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64)]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, bias=False), nn.BatchNorm2d(64)]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _mostly_buffers() -> nn.Module:
    """A small layer beside a large buffer: the weights are 0.3 % of what a round sends exactly."""
    model = nn.Linear(8, 8)
    model.register_buffer("table", torch.zeros(24_000))
    return model


MODELS: dict[str, Named] = {
    "large matrices": {f"{i}": (1024, 1024) for i in range(4)},
    "matrices and vectors": {
        f"{i}.{kind}": shape for i in range(3) for kind, shape in (("m", (256, 512)), ("b", (256,)))
    },
    "one number": {"scale": (1,)},
    "scalars": {f"{i}": () for i in range(9)},
    "small vectors": {f"{i}": (i + 1,) for i in range(40)},
    "LoRA": {f"{i}.{side}": shape for i in range(4) for side, shape in (("a", (4, 256)), ("b", (256, 4)))},
    "embedding": {"table": (4099, 32), "bias": (33,)},
    "convolutions with BatchNorm": _resnet(),
    "mostly buffers": _mostly_buffers(),
    "bf16": {"m": torch.empty(300, 500, dtype=torch.bfloat16), "b": torch.empty(500, dtype=torch.bfloat16)},
    "fp64": {"m": torch.empty(300, 500, dtype=torch.float64)},
    "with an empty tensor": {"m": (300, 500), "none": (0, 7)},
}
TARGETS = ("1x", "3.7x", "7.5x", "16x", "30x", "60x", "120x", "121x", "1000x")


def _times(plan: Plan, model: Named, workers: int) -> float:
    numbers = sum(t.numel() for t in facts_of(model, workers).tensors.values())
    return sent_bytes(ddp(), {"all in fp32": (numbers,)}, workers) / sent_bytes(plan, model, workers)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_frugal_meets_its_target_on_every_model(model: str, workers: int) -> None:
    for text in TARGETS:
        facts = facts_of(MODELS[model], workers)
        plan = frugal(text).resolved(facts)
        assert facts.times(plan) >= float(text[:-1]), (text, plan)
        if (text, workers) == ("60x", 3):
            assert _times(plan, MODELS[model], workers) >= 60


@pytest.mark.parametrize("model", MODELS)
def test_frugal_takes_the_shortest_period(model: str) -> None:
    facts = facts_of(MODELS[model], 3)
    for text in ("16x", "60x", "121x", "1000x"):
        plan = frugal(text, delay=1).resolved(facts)
        period = plan.schedule.period
        if period > 2:
            shorter = Plan(Streaming(period - 1, min(period - 1, 4), 1), plan.codec)
            assert facts.times(shorter) < float(text[:-1]), (text, plan)


def test_what_frugal_becomes_on_large_matrices() -> None:
    large, few_bits = MODELS["large matrices"], ErrorFeedback(Quantized(2))
    for text, plan in {
        "3.7x": quantized_ddp(8),
        "7.5x": quantized_ddp(4),
        "8x": power_sgd(255),
        "30x": power_sgd(132),
        "60x": power_sgd(66),
        "120x": Plan(Streaming(8, 4), few_bits),
        "121x": Plan(Streaming(4, 4), ErrorFeedback(Quantized(1, block=4096))),
    }.items():
        assert frugal(text).resolved(facts_of(large, 4)) == plan, text
    assert frugal("120x", start=5, delay=1).resolved(facts_of(large, 4)) == streaming_diloco(period=8, start=5)


def test_frugal_sends_gradients_of_low_rank_while_the_rank_is_a_large_share_of_the_width() -> None:
    narrow = {f"{i}": (128, 512) for i in range(4)}
    for optimizers in (("adaptive",), ("muon", "adaptive")):
        facts = facts_of(narrow, 4, optimizers=optimizers)
        assert frugal("60x", start=3).resolved(facts) == power_sgd(13, start=3)
        assert frugal("120x").resolved(facts).local  # rank 6 is below a twentieth
        assert frugal("60x", delay=1).resolved(facts).local  # gradients of one step cannot be late
    sgd = facts_of(narrow, 4, optimizers=("sgd",))
    assert frugal("30x").resolved(sgd) == power_sgd(26)
    assert frugal("60x").resolved(sgd).local  # rank 13 is below a sixth


def test_frugal_sends_few_bits_of_thin_matrices_under_adam() -> None:
    thin = {f"{i}.{side}": shape for i in range(4) for side, shape in (("a", (8, 256)), ("b", (256, 8)))}
    few = {text: frugal(text).resolved(facts_of(thin, 2)) for text in ("15x", "30x", "60x")}
    assert few["15x"] == quantized_ddp(2)
    assert few["30x"] == quantized_ddp(1, block=256)
    assert few["60x"].local
    assert frugal("30x").resolved(facts_of(thin, 2, optimizers=("sgd",))).local


def test_a_target_stands_for_what_it_becomes_on_large_matrices() -> None:
    for plan in (frugal("2x"), frugal("60x"), frugal("200.5x", start=7), frugal("120x", delay=1)):
        became = plan.resolved(facts_of({"large": (4096, 4096)}, 2))
        assert (plan.schedule, plan.codec) == (became.schedule, became.codec)
        assert plan != became
        assert type(became) is PlanClass
        assert laconic.plan(repr(became)) == became


def test_an_ordinary_plan_is_resolved() -> None:
    facts = facts_of(MODELS["LoRA"], 2)
    for plan in (ddp(), power_sgd(), laconic.auto(), laconic.alone()):
        assert plan.resolved(facts) is plan


def test_where_nothing_is_trained_a_target_is_what_it_stands_for() -> None:
    assert frugal("120x").resolved(facts_of({}, 2)) == streaming_diloco(period=8, delay=0)
    assert power_sgd(bytes="60x").resolved(facts_of({"none": (0,)}, 2)) == power_sgd(1)


@pytest.mark.parametrize("model", ["large matrices", "matrices and vectors", "embedding"])
@pytest.mark.parametrize("options", [{}, {"bits": 8}, {"bits": None, "min_compression": 1}])
def test_power_sgd_takes_the_largest_rank_that_meets_the_target(model: str, options: dict[str, int | None]) -> None:
    given, text = MODELS[model], "9x" if options else "20x"
    plan = power_sgd(bytes=text, **options).resolved(facts_of(given, 4))  # type: ignore[arg-type]
    assert isinstance(plan.codec, ByShape)
    low_rank = plan.codec.codec.codec  # type: ignore[attr-defined]
    assert plan == power_sgd(low_rank.rank, **options)  # type: ignore[arg-type]
    assert _times(plan, given, 4) >= float(text[:-1])
    assert _times(power_sgd(low_rank.rank + 1, **options), given, 4) < float(text[:-1])  # type: ignore[arg-type]


def test_a_target_that_rank_1_does_not_reach_is_refused() -> None:
    lora = MODELS["LoRA"]
    with pytest.raises(ValueError) as error:
        power_sgd(bytes="60x", start=3).resolved(facts_of(lora, 2))
    assert str(error.value) == (
        "power_sgd(bytes='60x', start=3): even rank 1 sends only 20.7 times fewer bytes than ddp() on this model. Its "
        "matrices are small or thin, or too few: 0% of its numbers are in tensors that are not sent as factors. "
        "Use frugal(bytes='60x'), which sends so much less on any model."
    )
    with pytest.raises(ValueError, match="100% of its numbers are in tensors that are not"):
        power_sgd(bytes="60x").resolved(facts_of(MODELS["small vectors"], 2))


def test_what_any_rank_reaches_sends_all_in_few_bits() -> None:
    facts = facts_of(MODELS["large matrices"], 2)
    assert facts.times(power_sgd(bytes="7x").resolved(facts)) == facts.times(quantized_ddp(4))


def test_buffers_count_in_rounds_of_weights() -> None:
    model = _mostly_buffers()
    exact = sent_bytes(Plan(Every(4)), model)
    assert exact == (72 + 24_000) * 4 / 4
    assert exact == sent_bytes(Plan(Every(4)), dict(model.named_parameters()), buffers={"table": (24_000,)})
    assert sent_bytes(Plan(Every(4), buffers="keep"), model) == 72
    assert sent_bytes(Plan(Streaming(4, 4)), model) == exact  # with one of the fragments
    assert sent_bytes(ddp(), model) == 72 * 4


@pytest.mark.parametrize("bytes", ["60", "x", "0.5x", "-3x", "1e3x", 60, None])
def test_a_target_is_a_number_of_times(bytes: object) -> None:
    with pytest.raises(ValueError, match=r"frugal\(bytes=.*\): write how many times fewer bytes than DDP"):
        frugal(bytes)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [2, 4, "machine"])
def test_with_groups_the_target_is_for_what_a_group_sends(group: Literal["machine"] | int) -> None:
    model, size = MODELS["matrices and vectors"], 4 if group == "machine" else group
    assert isinstance(size, int)
    facts = facts_of(model, 8, machine=4)
    for text in ("2x", "16x", "60x", "121x"):
        plan = frugal(text, group=group).resolved(facts)
        assert plan.topology == Groups(group) and plan.local  # never gradients between groups
        assert laconic.plan(repr(plan)) == plan
        # All but the first `size` workers get what these send: each to each in an all_to_all, a ring for the rest.
        deltas = [each for one in planned(plan, facts.tensors, 8, machine=4) for each in one.collectives]
        between = [each for each in deltas if each.workers == 8]
        crossing = sum(crossing_bytes(each.op, each.payload_bytes, 8, size) for each in between) / cycle_of(plan)
        assert facts.times(plan) == facts.ddp_bytes / crossing >= float(text[:-1])
    alike = facts_of(model, 8, machine=2)
    assert frugal("60x", group=2).resolved(alike).schedule == frugal("60x", group="machine").resolved(alike).schedule


def test_a_target_with_groups_prints_as_it_was_called() -> None:
    plan = frugal("60x", delay=1, group="machine")
    assert repr(plan) == "frugal(bytes='60x', delay=1, group='machine')"
    assert laconic.plan(repr(plan)) == plan != frugal("60x", delay=1)
    assert plan.resolved(facts_of({}, 2)).topology == Groups("machine")
    with pytest.raises(ValueError, match=r"tell how many workers a machine has, as in machine=4"):
        sent_bytes(plan, MODELS["LoRA"], 4)
    assert sent_bytes(plan, MODELS["LoRA"], 4, machine=2) > 0


@pytest.mark.parametrize("method", [power_sgd, quantized_ddp, laconic.demo, laconic.ddp])
def test_methods_that_average_gradients_refuse_groups(method: Callable[..., Plan]) -> None:
    name = method.__name__
    with pytest.raises(ValueError) as error:
        method(group="machine")
    assert str(error.value) == (
        f"{name}(group='machine'): it averages gradients among all workers, not between groups. Use "
        "frugal(group='machine') or diloco(group='machine'), which send weights between groups. Or shard the model "
        f"inside each machine with FSDP2 (HSDP, docs/sharded.md): {name}() then encodes what machines send."
    )
