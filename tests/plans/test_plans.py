"""Plans: values that print as the code that makes them, and parse from that text."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import laconic
from laconic import (
    ByShape,
    Cast,
    Codec,
    ErrorFeedback,
    Every,
    Exact,
    Groups,
    LowRank,
    Nesterov,
    Never,
    Plan,
    PlanError,
    Quadratic,
    Quantized,
    Streaming,
    alone,
    ddp,
    demo,
    diloco,
    frugal,
    post_local_sgd,
    power_sgd,
    qsr,
    quantized_ddp,
    sparse_loco,
    streaming_diloco,
)
from laconic.plans.schedules import Payload, Timed

steps = st.integers(1, 10**6)
schedules = st.one_of(
    st.builds(Every, steps, steps),
    st.builds(Every, steps, steps, st.just("weights")),
    st.builds(Timed, st.floats(1e-9, 1e9), steps),
)
low_ranks = st.builds(
    LowRank,
    rank=st.integers(1, 64),
    min_compression=st.integers(0, 9) | st.floats(0, 1e6),
    rounds=st.sampled_from(["two", "alternating"]),
    seed=st.integers(),
) | st.builds(LowRank, rank=st.integers(1, 64), warm_start=st.booleans())
whole_codecs: st.SearchStrategy[Codec] = st.builds(Exact, st.booleans()) | st.builds(
    Cast, st.sampled_from(["bf16", "fp16"])
)
any_feedback = st.sampled_from(["own", "mean"])
codecs = st.one_of(
    whole_codecs,
    low_ranks,
    st.builds(ErrorFeedback, whole_codecs | low_ranks, any_feedback),
    st.builds(ByShape, low_ranks | st.builds(ErrorFeedback, low_ranks, any_feedback), whole_codecs),
    st.builds(ByShape, low_ranks | st.builds(ErrorFeedback, low_ranks)),
    st.builds(ErrorFeedback, st.builds(ByShape, low_ranks, whole_codecs)),
)
plans = st.one_of(
    st.builds(Plan, schedules, codecs),
    st.builds(
        power_sgd,
        rank=st.integers(1, 64),
        start=steps,
        min_compression=st.integers(0, 9),
        rounds=st.sampled_from(["two", "alternating"]),
        feedback=st.booleans(),
        seed=st.integers(0, 9),
    ),
    st.builds(post_local_sgd, steps, steps),
)


@given(plans)
@settings(deadline=None, max_examples=300)
def test_the_repr_of_a_plan_parses_to_that_plan(plan: Plan) -> None:
    again = laconic.plan(repr(plan))
    assert again == plan
    assert hash(again) == hash(plan)
    assert repr(again) == repr(plan)


@given(plans, plans)
@settings(deadline=None, max_examples=100)
def test_equal_reprs_mean_equal_plans_and_equal_plans_have_equal_hashes(a: Plan, b: Plan) -> None:
    assert a == b or repr(a) != repr(b)
    assert a != b or hash(a) == hash(b)


PRINTED = {
    "ddp()": ddp(),
    "ddp(dtype='bf16')": ddp("bf16"),
    "alone()": alone(),
    "Plan(schedule=Never(), topology=Groups(size=2))": Plan(Never(), topology=Groups(2)),
    "diloco(period=1, codec=Cast(to='bf16'))": Plan(Every(1, of="weights"), Cast("bf16")),
    "Plan(schedule=Quadratic(growth=0.1), codec=Cast(to='bf16'))": Plan(Quadratic(0.1), Cast("bf16")),
    "power_sgd(rank=32, bits=4)": power_sgd(),
    "power_sgd(rank=2, bits=None, rounds='alternating')": Plan(
        codec=ByShape(ErrorFeedback(LowRank(2, rounds="alternating")))
    ),
    "quantized_ddp(bits=4)": quantized_ddp(),
    "quantized_ddp(bits=2, block=64, start=3)": quantized_ddp(2, 64, 3),
    "frugal(bytes='60x')": frugal(),
    "frugal(bytes='200.5x', start=5)": frugal("200.5x", start=5),
    "power_sgd(bytes='60x')": power_sgd(bytes="60x"),
    "power_sgd(bytes='60x', bits=None, start=9)": power_sgd(bytes="60x", bits=None, start=9),
    "streaming_diloco(period=4, fragments=4, delay=0)": Plan(Streaming(4, 4), ErrorFeedback(Quantized(2))),
    "frugal(bytes='120x', delay=1)": frugal("120x", delay=1),
    "demo(bits=4)": demo(),
    "demo(fraction=0.015625, bits=8, decay=0.99, chunk=32)": demo(1 / 64, 8, 0.99, 32),
    "sparse_loco(period=4)": sparse_loco(),
    "sparse_loco(period=8, fraction=0.03, decay=1.0, lr=0.8)": sparse_loco(8, 0.03, 1.0, 0.8),
    "diloco(period=16)": diloco(),
    "diloco(period=16, lr=0.7, codec=Exact())": diloco(lr=0.7, codec=Exact()),
    "diloco(every='30s')": Plan(Timed(30), ErrorFeedback(Quantized(2))),
    "diloco(momentum=0.9, start=5, every='90s')": diloco(every="1.5min", momentum=0.9, start=5),
    "post_local_sgd(start=5, every='0.5s')": Plan(Timed(0.5, 5)),
    "sparse_loco(every='3600s')": sparse_loco(every="1h"),
    "diloco(codec=Exact(wide=True), every='30s')": Plan(Timed(30), Exact(wide=True)),
    "power_sgd(rank=1, bits=None)": power_sgd(1, None),
    "power_sgd(rank=4, bits=4, start=100, min_compression=0.5, feedback=False, seed=3)": power_sgd(
        4, start=100, min_compression=0.5, feedback=False, seed=3
    ),
    "power_sgd(rank=32, bits=4, warm_start=False)": power_sgd(warm_start=False),
    "post_local_sgd(period=16)": post_local_sgd(),
    "post_local_sgd(start=500, period=8)": Plan(Every(8, 500)),
    "post_local_sgd(period=8)": Plan(Every(8)),
    "Plan(schedule=Every(start=5))": Plan(Every(start=5)),
    "Plan(codec=Exact(wide=True))": Plan(codec=Exact(wide=True)),
    "Plan(codec=ByShape(codec=LowRank(rank=2), rest=Cast(to='fp16')))": Plan(
        codec=ByShape(LowRank(2), rest=Cast("fp16"))
    ),
    "Plan(codec=ByShape(codec=ErrorFeedback(codec=LowRank(rank=2), subtract='mean')))": Plan(
        codec=ByShape(ErrorFeedback(LowRank(2), "mean"))
    ),
    "diloco(period=4, codec=ByShape(codec=ErrorFeedback(codec=LowRank(rank=2))))": Plan(
        Every(4), ByShape(ErrorFeedback(LowRank(2)))
    ),
}


@pytest.mark.parametrize("text", PRINTED)
def test_prints_as_its_named_method(text: str) -> None:
    assert repr(PRINTED[text]) == text
    assert laconic.plan(text) == PRINTED[text]


def test_all_of_them_differ() -> None:
    assert len(set(PRINTED.values())) == len(PRINTED)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("power_sgd(2)", power_sgd(2)),
        ("laconic.power_sgd(rank=2)", power_sgd(2)),
        ("Plan()", ddp()),
        ("Plan(Every(1), Exact(), Nesterov(1, 0))", ddp()),
        (" Plan(\n codec=laconic.Cast('bf16'),\n)", Plan(codec=Cast("bf16"))),
    ],
)
def test_equivalent_texts(text: str, plan: Plan) -> None:
    assert laconic.plan(text) == plan


SAME = [
    (post_local_sgd(period=16), Plan(Every(16)), diloco(codec=Exact())),
    (Plan(Streaming(8, 4, delay=1), ErrorFeedback(Quantized(2))), streaming_diloco(period=8)),
    (Plan(Every(1, of="weights"), ErrorFeedback(Quantized(2))), diloco(period=1)),
    (power_sgd(32), power_sgd(), Plan(codec=power_sgd().codec)),
    (Plan(Every(4, of="weights"), Cast("bf16"), Nesterov(1, 0)), diloco(4, codec=Cast("bf16"))),
]


@pytest.mark.parametrize("plans", SAME, ids=lambda plans: repr(plans[0]))
def test_plans_that_do_the_same_are_equal_and_print_the_same(plans: tuple[Plan, ...]) -> None:
    assert len(set(plans)) == len(set(map(repr, plans))) == 1


def test_a_plan_is_frozen() -> None:
    with pytest.raises(AttributeError):
        ddp().codec = Exact()  # type: ignore[misc]


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (ddp(), [("gradient", Exact())] * 4),
        (Plan(Every(1, start=3), Cast("bf16")), [("gradient", Exact())] * 2 + [("gradient", Cast("bf16"))] * 2),
        (post_local_sgd(start=2, period=2), [("gradient", Exact()), None, ("weights", Exact()), None]),
        (alone(), [None] * 4),
        (Plan(Every(1, of="weights"), Cast("bf16")), [("weights", Cast("bf16"))] * 4),
        (Plan(Every(1, 2, "weights"), Cast("fp16")), [("gradient", Exact())] + [("weights", Cast("fp16"))] * 3),
    ],
)
def test_payload_and_codec_at_each_step(plan: Plan, expected: list[tuple[str, Codec] | None]) -> None:
    syncs = [[(sync.payload, plan.codec_of(sync, step)) for sync in plan.syncs_at(step)] for step in range(1, 5)]
    assert syncs == [[] if sync is None else [(Payload(sync[0]), sync[1])] for sync in expected]


@pytest.mark.parametrize(
    ("plan", "local", "needs_anchor"),
    [
        (ddp(), False, False),
        (power_sgd(start=10), False, False),
        (post_local_sgd(), True, False),
        (Plan(Every(4)), True, False),
        (alone(), True, False),
        (Plan(Every(1, of="weights")), True, False),
        (Plan(Every(1, of="weights"), Cast("bf16")), True, True),
        (Plan(Every(4), Cast("bf16")), True, True),
        (Plan(Streaming(4, 2)), True, False),
        (Plan(Streaming(4, 2, mix=0.0)), True, False),
        (Plan(Streaming(4, 2, mix=0.5)), True, True),
        (Plan(Streaming(4, 2, delay=1)), True, True),
        (Plan(Every(4, 9), ByShape(LowRank(1))), True, True),
    ],
)
def test_local_and_needs_anchor(plan: Plan, local: bool, needs_anchor: bool) -> None:
    assert (plan.local, plan.needs_anchor) == (local, needs_anchor)


RULES = {
    "power_sdg(rank=2)": "'power_sdg(rank=2)': there is no 'power_sdg'. Did you mean power_sgd?",
    "dpp()": "'dpp()': there is no 'dpp'. Did you mean ddp?",
    "Plan(codec=LowRnk(rank=2))": "'Plan(codec=LowRnk(rank=2))': there is no 'LowRnk'. Did you mean LowRank?",
    "power_sgd": "'power_sgd': power_sgd must be a call. Write power_sgd().",
    "power_sgd(ranks=2)": (
        "'power_sgd(ranks=2)': power_sgd: got an unexpected keyword argument 'ranks'. It is power_sgd(rank=None, "
        "bits=4, start=1, min_compression=2, rounds='two', feedback=True, warm_start=True, seed=0, bytes=None, "
        "group=None)."
    ),
    "Plan(Codec=Exact())": (
        "'Plan(Codec=Exact())': Plan: got an unexpected keyword argument 'Codec'. "
        "It is Plan(schedule, codec, outer, topology, buffers='average', optimizer_state='keep')."
    ),
    "ddp(4)": '\'ddp(4)\': Cast(4): the type must be "bf16" or "fp16". To send all bits, use Exact().',
    "power_sgd(rank=0)": ("'power_sgd(rank=0)': LowRank(rank=0): rank must be at least 1. To send all, use Exact()."),
    "power_sgd(4, bytes='60x')": (
        "\"power_sgd(4, bytes='60x')\": power_sgd(rank=4, bytes='60x'): the rank follows from the bytes. "
        "Give one of them."
    ),
    "power_sgd(bytes=60)": (
        '\'power_sgd(bytes=60)\': power_sgd(bytes=60): write how many times fewer bytes than DDP: "60x", at least "1x".'
    ),
    "power_sgd(start=0)": (
        "'power_sgd(start=0)': Every(start=0): start must be a whole number of at least 1, as steps count from 1."
    ),
    "post_local_sgd(period=0.5)": (
        "'post_local_sgd(period=0.5)': Every(period=0.5): period must be a whole number of at least 1, "
        "as steps count from 1."
    ),
    "power_sgd(rounds='one')": (
        '"power_sgd(rounds=\'one\')": LowRank(rounds=\'one\'): rounds must be "two" or "alternating".'
    ),
    "Plan(codec=Cast('int8'))": (
        '"Plan(codec=Cast(\'int8\'))": Cast(\'int8\'): the type must be "bf16" or "fp16". '
        "To send all bits, use Exact()."
    ),
    "LowRank(rank=4)": (
        "'LowRank(rank=4)' is a LowRank, which can only be a part of a plan. "
        "Write a method such as power_sgd(rank=4), or Plan(schedule=..., codec=...)."
    ),
    "4": (
        "'4' is a int, which can only be a part of a plan. "
        "Write a method such as power_sgd(rank=4), or Plan(schedule=..., codec=...)."
    ),
    "frugal(120x)": (
        "'frugal(120x)' is not a plan: what begins with a digit and is no number needs quotes, as in "
        'frugal("120x"). Write a call, such as power_sgd(rank=4).'
    ),
    "frugal('8x', delay=1)": (
        "\"frugal('8x', delay=1)\": frugal(bytes='8x', delay=1): what is sent whole at every step cannot be late. "
        'Use delay=0, or from "16x" on, where each step sends a fragment.'
    ),
    "train quickly": "'train quickly' is not a plan: invalid syntax. Write a call, such as power_sgd(rank=4).",
    "power_sgd(rank=four)": (
        "'power_sgd(rank=four)': cannot read 'four'. A plan consists of calls, numbers and quoted strings, "
        "such as power_sgd(rank=4)."
    ),
}


@pytest.mark.parametrize("text", RULES)
def test_invalid_text_is_refused_with_a_reason(text: str) -> None:
    with pytest.raises(PlanError) as error:
        laconic.plan(text)
    assert str(error.value) == RULES[text]


@pytest.mark.parametrize(
    "text",
    [
        "Plan(codec=5)",
        "Plan(codec=Every(1))",
        "Plan(schedule=Exact())",
        "Plan(outer=3)",
        "Plan(codec=ByShape(5))",
        "Plan(codec=ErrorFeedback('Exact()'))",
        "Plan(codec={'a': 1})",
        "power_sgd(rank=2.5)",
        "power_sgd(rank=1e999)",
        "power_sgd(rank=True)",
        "power_sgd(min_compression=1e999)",
        "power_sgd(feedback='no')",
        "power_sgd(seed=[1])",
    ],
)
def test_invalid_parts_are_refused(text: str) -> None:
    with pytest.raises(PlanError):
        laconic.plan(text)


@pytest.mark.parametrize("part", ["schedule", "codec", "outer"])
def test_parts_are_checked_in_code_too(part: Literal["schedule", "codec", "outer"]) -> None:
    given: dict[str, Any] = {part: 5}
    with pytest.raises((TypeError, ValueError), match=rf"Plan\({part}=5"):
        Plan(**given)


@pytest.mark.parametrize("text", ["power_sgd(rank='4')", "power_sgd(rank=2.5)", "power_sgd(min_compression='2')"])
def test_values_of_the_wrong_type_are_refused_with_a_reason(text: str) -> None:
    with pytest.raises(PlanError, match=r"LowRank\((rank|min_compression)="):
        laconic.plan(text)


@pytest.mark.parametrize(
    "text",
    [
        "post_local_sgd(period=16, group=2)",
        "post_local_sgd(start=5, period=16, group='machine', buffers='leader')",
        "hierarchical_sgd(groups={4: 8, 16: 32}, start=3)",
        "qsr(growth=0.02, floor=8)",
        "diloco(period=100, lr=0.5, codec=ErrorFeedback(codec=LowRank(rank=4)), optimizer_state='average')",
        "streaming_diloco(period=100, fragments=8, delay=2)",
        "Plan(schedule=Nested(groups={2: 2, 4: 4}), outer=Nesterov())",
        "Plan(schedule=Every(period=4), outer=Optim(optimizer='AdamW', options={'lr': 0.1}), topology=Groups(size=4))",
    ],
)
def test_local_methods_print_as_they_are_written(text: str) -> None:
    made = laconic.plan(text)
    assert laconic.plan(repr(made)) == made
    assert hash(laconic.plan(repr(made))) == hash(made)
    assert made.local


@pytest.mark.parametrize(
    "option", ["outer=Nesterov()", "topology=Groups(2)", "buffers='keep'", "optimizer_state='reset'"]
)
def test_options_of_weight_rounds_are_refused_without_them(option: str) -> None:
    with pytest.raises(PlanError, match="averages gradients at every step and never weights"):
        laconic.plan(f"Plan(schedule=Every(1), {option})")


@pytest.mark.parametrize("option", ["codec=Cast('bf16')", "outer=Nesterov()", "buffers='keep'"])
def test_options_of_averages_are_refused_where_workers_never_synchronise(option: str) -> None:
    with pytest.raises(PlanError, match=r"workers never synchronise, so .* Leave it out, or choose a schedule"):
        laconic.plan(f"Plan(schedule=Never(), {option})")


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="buffers must be 'average' or 'leader' or 'keep'"):
        post_local_sgd(buffers="mean")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer_state must be 'keep' or 'average' or 'reset'"):
        post_local_sgd(optimizer_state="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "method", [post_local_sgd, diloco, streaming_diloco, partial(qsr, growth=0.02), sparse_loco, frugal]
)
def test_wrong_groups_are_named_as_they_were_given(method: Any) -> None:
    name = getattr(method, "func", method).__name__
    for group in (0, 1, "site"):
        said = f"{name}(group={group!r}): it must be a whole number of at least 2 workers"
        with pytest.raises(ValueError, match=re.escape(said)):
            method(group=group)
