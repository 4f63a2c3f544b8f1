"""The bytes that a plan sends, computed without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.codecs import ByName, ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, TopK
from laconic.codecs.routing import routed
from laconic.cost import facts_of, has_rule, kept_bytes, planned, tensor_bytes
from laconic.exchange import State
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Nested, Streaming

SHAPES = {"w": (100, 50), "b": (50,)}
DENSE = 4 * 5050


@pytest.mark.parametrize(
    ("text", "sent"),
    [
        ("ddp()", DENSE),
        ("alone()", 0),
        ("Plan(schedule=Every(1, of='weights'))", DENSE),
        ("Plan(schedule=Every(1, of='weights'), codec=Cast('bf16'))", DENSE / 2),
        ("power_sgd(rank=2, bits=None)", 4 * (2 * 150 + 50)),
        ("power_sgd(rank=2, bits=None, rounds='alternating')", 4 * (150 + 50)),  # P and Q alternate
        ("power_sgd(rank=2, bits=None, feedback=False)", 4 * (2 * 150 + 50)),
        ("power_sgd(rank=2, bits=None, start=10)", 4 * (2 * 150 + 50)),  # from `start` on
        ("power_sgd(rank=40, bits=None)", DENSE),  # would not shrink
        ("post_local_sgd(period=16)", DENSE / 16),
        ("post_local_sgd(start=100, period=5)", DENSE / 5),
        ("Plan(schedule=Every(period=10), codec=Cast('bf16'))", DENSE / 20),
        ("Plan(schedule=Every(8, 3), codec=LowRank(rank=2))", 4 * (2 * 150 + 50) / 8),
        ("Plan(schedule=Every(8, 3), codec=ByShape(LowRank(rank=2, rounds='alternating')))", 4 * (150 + 50) / 8),
        ("Plan(codec=ErrorFeedback(LowRank(rank=2)))", 4 * (2 * 150 + 50)),  # vectors are sent exactly
    ],
)
def test_bytes_of_one_step(text: str, sent: float) -> None:
    assert laconic.sent_bytes(laconic.plan(text), SHAPES) == pytest.approx(sent)


def module() -> nn.Module:
    model = nn.Sequential(nn.Linear(50, 100, bias=False), nn.LayerNorm(25, bias=False), nn.Linear(3, 3))
    model[2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "given",
    [
        lambda: {"w": (100, 50), "b": (25,)},
        lambda: {"w": torch.Size([100, 50]), "b": [25]},
        lambda: {"w": torch.empty(100, 50), "b": torch.empty(25, device="meta")},
        lambda: (pair for pair in [("w", (100, 50)), ("b", (25,))]),
        lambda: [("w", torch.empty(50, 100).T), ("b", torch.empty(50)[::2])],
        lambda: module(),
        lambda: [(name, p) for name, p in module().named_parameters() if p.requires_grad],
    ],
)
@pytest.mark.parametrize("plan", [laconic.ddp(), laconic.power_sgd(rank=2, bits=None)], ids=repr)
def test_tensors_shapes_and_modules_are_accepted(given: Callable[[], Any], plan: Plan) -> None:
    expected = 4 * 5025 if plan == laconic.ddp() else 4 * (2 * 150 + 25)
    assert laconic.sent_bytes(plan, given()) == expected


def test_no_memory_is_allocated() -> None:
    huge = {"w": (10**6, 10**6), "b": (10**6,)}
    assert laconic.sent_bytes(laconic.ddp(), huge) == 4 * (10**12 + 10**6)
    assert laconic.sent_bytes(laconic.power_sgd(rank=4, bits=None), huge) == 4 * (4 * 2 * 10**6 + 10**6)


def test_each_dtype_counts_its_own_bytes() -> None:
    mixed = {"a": torch.empty(10, dtype=torch.bfloat16), "b": torch.empty(10), "c": torch.empty(10).double()}
    assert laconic.sent_bytes(laconic.ddp(), mixed) == 20 + 40 + 80
    assert laconic.sent_bytes(Plan(codec=Cast("fp16")), mixed) == 60


@pytest.mark.parametrize(
    "plan", [laconic.quantized_ddp(8), laconic.quantized_ddp(4), laconic.quantized_ddp(2)], ids=repr
)
@pytest.mark.parametrize("workers", [3, 8, 64])
def test_few_bits_stay_few_for_any_number_of_workers(plan: Plan, workers: int) -> None:
    shapes = {"w": (1024, 1024), "b": (1024,)}
    dense = laconic.sent_bytes(laconic.ddp(), shapes, workers) / laconic.sent_bytes(laconic.ddp(), shapes)
    assert laconic.sent_bytes(plan, shapes, workers) == pytest.approx(
        dense * laconic.sent_bytes(plan, shapes), rel=0.02
    )


def test_a_single_worker_sends_nothing() -> None:
    assert laconic.sent_bytes(laconic.ddp(), SHAPES, workers=1) == 0


def test_empty_input_sends_no_bytes() -> None:
    assert laconic.sent_bytes(laconic.power_sgd(), {}) == 0
    assert laconic.sent_bytes(laconic.ddp(), {"none": (0, 3)}) == 0


@pytest.mark.parametrize("workers", [0, -1, 1.5])
def test_an_invalid_number_of_workers_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match="workers"):
        laconic.sent_bytes(laconic.ddp(), SHAPES, workers)


@pytest.mark.parametrize("machine", [0, 3, 16, "4", True])
def test_a_machine_has_as_many_workers_as_divide_them(machine: Any) -> None:
    said = rf"sent_bytes\(workers=8, machine={machine!r}\): machine must be .* such as workers=8, machine=4"
    with pytest.raises(ValueError, match=said):
        laconic.sent_bytes(laconic.diloco(group="machine"), SHAPES, 8, machine=machine)


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (laconic.frugal(group=3), "groups of 3, and 8 workers cannot be divided so. Choose a size that divides 8"),
        (laconic.diloco(group=3), "groups of 3, and 8 workers cannot be divided so"),
        (laconic.hierarchical_sgd({2: 4}), "last groups have 4 workers, and there are 8"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit_are_refused_as_by_attach(plan: Plan, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        laconic.sent_bytes(plan, SHAPES, workers=8)


def test_plans_with_an_anchor_send_encoded_deltas() -> None:
    plan = Plan(Every(4), Cast("bf16"))
    assert plan.needs_anchor
    assert laconic.sent_bytes(plan, SHAPES) == DENSE / 8


def test_deltas_of_half_precision_weights_are_fp32() -> None:
    plan = Plan(Every(4), ByShape(LowRank(rank=1)))
    assert plan.needs_anchor
    assert laconic.sent_bytes(plan, {"b": torch.empty(64, dtype=torch.bfloat16)}) == 64 * 4 / 4


@pytest.mark.parametrize(
    ("codec", "runs"),
    [
        (Exact(), Exact()),
        (Cast("bf16"), Cast("bf16")),
        (LowRank(2), ByShape(LowRank(2))),
        (ErrorFeedback(LowRank(2)), ByShape(ErrorFeedback(LowRank(2)))),
        (ByShape(LowRank(2)), ByShape(LowRank(2))),
        (ErrorFeedback(Cast("fp16")), ErrorFeedback(Cast("fp16"))),
    ],
)
def test_tensors_that_a_codec_declines_are_sent_exactly(codec: Codec, runs: Codec) -> None:
    assert routed(codec) == runs


def test_long_periods() -> None:
    assert laconic.sent_bytes(Plan(Every(50_000)), {"w": (50_000,)}) == 4


def _odd() -> dict[str, tuple[nn.Module | dict[str, torch.Tensor], int]]:
    """Models, and the numbers of workers to divide their rows among."""
    equal = {f"{i}.{kind}": torch.empty(shape) for i in range(9) for kind, shape in (("m", (96, 130)), ("b", (130,)))}
    narrow = {"m": torch.empty(90, 50, dtype=torch.bfloat16), "b": torch.empty(50, dtype=torch.bfloat16)}
    mixed = {**narrow, "wide": torch.empty(70, 129, dtype=torch.float64), "c": torch.empty(33)}
    edges = {"none": torch.empty(0, 7), "scalar": torch.empty(()), "one": torch.empty(1), "row": torch.empty(1, 999)}
    large = {"table": torch.empty(3001, 2203), "thin": torch.empty(90_001, 3), "rest": torch.empty(4, 5, 6, 7)}
    return {
        "equal layers": (equal, 8),
        "equal layers, 3 workers": (equal, 3),
        "16 bits": (narrow, 2),
        "several dtypes": (mixed, 5),
        "edges": (edges, 4),
        "many small": ({f"{i}": torch.empty(i % 7 + 1, i) for i in range(1, 60)}, 7),
        "large": (large, 2),
        "convolutions": (nn.Sequential(nn.Conv2d(16, 24, 3), nn.BatchNorm2d(24), nn.Linear(70, 129)), 6),
        "many workers": ({"m": torch.empty(300, 200), "b": torch.empty(200)}, 1000),
    }


FEW = ErrorFeedback(Quantized(2, block=64))
RULED: list[Codec] = [
    Exact(),
    Cast("bf16"),
    ErrorFeedback(Cast("fp16")),
    ErrorFeedback(Quantized(8)),
    Quantized(4, rounding="stochastic"),
    FEW,
    ErrorFeedback(Quantized(1, block=4096), decay=0.9),
    LowRank(2, warm_start=False),
    laconic.power_sgd(3).codec,
    laconic.power_sgd(3, bits=None).codec,
    laconic.power_sgd(40, bits=2, min_compression=0.5).codec,
    laconic.power_sgd(3, rounds="alternating").codec,
    laconic.power_sgd(3, bits=None, rounds="alternating", feedback=False).codec,
    ErrorFeedback(ByShape(LowRank(2), Quantized(4))),
    laconic.sparse_loco().codec,
    ByShape(TopK(0.06, chunk=1024), rest=Exact(wide=True)),
    ByName({"*m": FEW, "0*": LowRank(3), "*b": Cast("bf16")}, rest=ByShape(ErrorFeedback(LowRank(1, bits=4)), FEW)),
]


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("large", "many"))) for name in _odd()]
)
def test_the_rules_are_what_codecs_send_and_keep(model: str) -> None:
    given, workers = _odd()[model]
    facts = facts_of(given, workers)
    schedules = (Every(1), Every(1, of="weights"), Every(3), Streaming(5, 4, delay=1), Nested({1: 1, 2: workers}))
    for index, codec in enumerate(RULED):
        assert has_rule(codec)
        plan, state = Plan(schedules[(index + workers) % 5], codec), State()
        ran = list(planned(plan, facts.tensors, workers, state=state, buffers=facts.buffers, by_rule=False))
        ruled = list(planned(plan, facts.tensors, workers, buffers=facts.buffers))
        assert ruled == ran, plan
        wide = {name: t.float() if plan.needs_anchor and t.itemsize == 2 else t for name, t in facts.tensors.items()}
        assert kept_bytes(routed(codec), wide) == tensor_bytes(state), plan


def test_a_codec_without_a_rule_runs() -> None:
    class Twice(Quantized):
        def average(self, *args: Any, **options: Any) -> Any:
            yield from super().average(*args, **options)
            return (yield from super().average(*args, **options))

    assert not has_rule(Twice(4)) and not has_rule(ByShape(LowRank(1), Twice(4)))
    assert laconic.sent_bytes(Plan(codec=Twice(4)), SHAPES) == 2 * laconic.sent_bytes(Plan(codec=Quantized(4)), SHAPES)


def test_only_steps_that_send_are_looked_at() -> None:
    for plan in (
        Plan(),
        Plan(Every(7, 3)),
        Plan(Streaming(7, 3, start=5)),
        Plan(Streaming(4, 4)),
        Plan(Every(1, 2, "weights")),
    ):
        first = plan.schedule.start
        steps = range(first, first + 2 * plan.schedule.period)
        sent = [step for step in steps if plan.syncs_at(step)]
        assert [each.step for each in planned(plan, facts_of(dict.fromkeys("abcd", (4,)), 2).tensors, 2)] == sent
    assert laconic.sent_bytes(Plan(Streaming(10**12, 2)), {"a": (5,), "b": (5,)}) == 40 / 10**12
