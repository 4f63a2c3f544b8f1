"""Named methods: functions that return plans.

`ddp()`, `alone()`, `power_sgd()`, `quantized_ddp(bits=4)`, `diloco(period=16)`, `frugal(bytes="60x")` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from laconic.codecs import ByShape, Cast, Codec, ErrorFeedback, Exact, LowRank, Quantized, TopDCT, TopK
from laconic.plans.outer import Nesterov
from laconic.plans.plan import Buffers, OptimizerState, Plan
from laconic.plans.schedules import Every, Nested, Never, Quadratic, Schedule, Streaming, Timed, seconds_in
from laconic.plans.topology import Groups, Topology, World, check_group

Group: TypeAlias = int | Literal["machine"] | None
"""Groups of so many workers, or the workers of one machine, which average gradients exactly at every step."""


def ddp(dtype: Literal["bf16", "fp16"] | None = None, group: Group = None) -> Plan:
    """Average gradients exactly at every step, as DDP does; with a `dtype`, rounded to it, in half the bytes of fp32.

    >>> ddp("bf16")
    ddp(dtype='bf16')
    """
    _check_no_group("ddp", group)
    return Plan() if dtype is None else Plan(codec=Cast(dtype))


def alone() -> Plan:
    """Never synchronise: after the handshake of `attach` nothing is sent, and each worker trains a model of its own.

    The baseline: a plan that ends with no lower loss than this has sent its bytes for nothing.
    """
    return Plan(Never())


def power_sgd(
    rank: int | None = None,
    bits: int | None = 4,
    start: int = 1,
    min_compression: float = 2,
    rounds: Literal["two", "alternating"] = "two",
    feedback: bool = True,
    warm_start: bool = True,
    seed: int = 0,
    bytes: str | None = None,
    group: Group = None,
) -> Plan:
    """Average gradients at every step, each matrix as two thin factors (PowerSGD, arXiv:1905.13727).

    `rank` is 32 by default. With `bytes`, such as "60x", it is the largest at which at least so many times fewer bytes
    are sent than by `ddp()` in fp32; `attach` finds it from the model's shapes. Factors, vectors and small tensors
    travel in `bits` bits a number; None sends all bits. Steps before `start` average exactly. `rounds="alternating"`
    sends one factor a step: half the bytes of that rank, and on large models far worse losses (docs/quality.md).

    >>> power_sgd(rank=1, bits=None).codec
    ByShape(codec=ErrorFeedback(codec=LowRank(rank=1)))
    >>> power_sgd(bytes="60x")
    power_sgd(bytes='60x')
    """
    _check_no_group("power_sgd", group)
    if not isinstance(feedback, bool):
        raise ValueError(f"power_sgd(feedback={feedback!r}): feedback must be True or False.")
    if bytes is not None:
        options = {
            "bits": bits,
            "start": start,
            "min_compression": min_compression,
            "rounds": rounds,
            "feedback": feedback,
            "warm_start": warm_start,
            "seed": seed,
        }
        if rank is not None:
            raise ValueError(
                f"power_sgd(rank={rank!r}, bytes={bytes!r}): the rank follows from the bytes. Give one of them."
            )
        from laconic.plans.targets import power_sgd_target  # targets.py imports this file

        return power_sgd_target(bytes, options)
    codec: Codec = LowRank(32 if rank is None else rank, min_compression, rounds, warm_start, seed, bits)
    rest: Codec = Exact() if bits is None else Quantized(bits)
    if feedback:
        codec, rest = ErrorFeedback(codec), rest if bits is None else ErrorFeedback(rest)
    return Plan(Every(1, start), ByShape(codec, rest))


def quantized_ddp(bits: int = 4, block: int = 128, start: int = 1, group: Group = None) -> Plan:
    """Average gradients at every step in few bits, with error feedback: 4 bits cost next to nothing (docs/quality.md).

    >>> quantized_ddp().codec
    ErrorFeedback(codec=Quantized(bits=4))
    """
    _check_no_group("quantized_ddp", group)
    return Plan(Every(1, start), ErrorFeedback(Quantized(bits, block)))


def post_local_sgd(
    start: int = 1,
    period: int | None = None,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
    every: str | None = None,
) -> Plan:
    """Average gradients at every step before `start`, then weights every `period` steps (arXiv:1808.07217).

    `period` is 16 by default. With `every`, such as "30s", rounds end by time instead: see `Timed`. With `group`,
    groups of that many workers, or the workers of one "machine", keep averaging gradients at every step.
    """
    schedule, topology = _rounds("post_local_sgd", period, every, start), _topology("post_local_sgd", group)
    return Plan(schedule, topology=topology, buffers=buffers, optimizer_state=optimizer_state)


def hierarchical_sgd(
    groups: Mapping[int, int],
    start: int = 1,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average weights in groups of growing size with growing periods (arXiv:2010.12998).

    >>> hierarchical_sgd({4: 8, 16: 32})
    hierarchical_sgd(groups={4: 8, 16: 32})
    """
    return Plan(Nested(groups, start), buffers=buffers, optimizer_state=optimizer_state)


def diloco(
    period: int | None = None,
    lr: float = 1.0,
    momentum: float = 0.0,
    codec: Codec | None = None,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
    every: str | None = None,
) -> Plan:
    """Average weight deltas every `period` steps and apply them with Nesterov momentum (DiLoCo, arXiv:2311.08105).

    `period` is 16 by default. With `every`, such as "30s", rounds end by time instead, for workers of different speed:
    see `Timed`.

    Deltas travel in 2 bits by default, with error feedback, which costs nothing beside exact ones. The defaults are for
    runs of hundreds to thousands of steps, in which outer momentum loses: after 3000 steps the paper's values
    (period=100 or more, lr=0.7, momentum=0.9) are still worse than no communication (docs/quality.md). They were made
    for tens of thousands.
    """
    schedule = _rounds("diloco", period, every, start)
    codec = few_bit_deltas() if codec is None else codec
    return Plan(schedule, codec, Nesterov(lr, momentum), _topology("diloco", group), buffers, optimizer_state)


def streaming_diloco(
    period: int = 16,
    fragments: int = 4,
    delay: int = 1,
    lr: float = 1.0,
    momentum: float = 0.0,
    codec: Codec | None = None,
    mix: float | None = None,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """DiLoCo in fragments that synchronise at different steps and overlap with training (arXiv:2501.18512).

    The defaults are those of `diloco`.
    """
    schedule = Streaming(period, fragments, delay, mix, start)
    codec = few_bit_deltas() if codec is None else codec
    return Plan(schedule, codec, Nesterov(lr, momentum), _topology("streaming_diloco", group), buffers, optimizer_state)


def qsr(
    growth: float,
    floor: int = 4,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
) -> Plan:
    """Average weights every (growth / lr)² steps: less often as the learning rate falls (arXiv:2310.14423)."""
    schedule = Quadratic(growth, floor, start)
    return Plan(schedule, topology=_topology("qsr", group), buffers=buffers, optimizer_state=optimizer_state)


def sparse_loco(
    period: int | None = None,
    fraction: float = 0.06,
    decay: float = 0.95,
    lr: float = 1.0,
    start: int = 1,
    group: Group = None,
    buffers: Buffers = "average",
    optimizer_state: OptimizerState = "keep",
    every: str | None = None,
) -> Plan:
    """Average the largest deltas in 2 bits every `period` steps, with decayed feedback (SparseLoCo, arXiv:2508.15706).

    `period` is 4 by default. With `every`, such as "5s", rounds end by time instead: see `Timed`. Dense deltas in 1 or
    2 bits keep as much of the training or more at the same bytes (docs/quality.md).
    """
    codec = ByShape(ErrorFeedback(TopK(fraction, bits=2), decay=decay), rest=ErrorFeedback(Quantized(4)))
    schedule, topology = _rounds("sparse_loco", period, every, start, usual=4), _topology("sparse_loco", group)
    return Plan(schedule, codec, Nesterov(lr, 0.0), topology, buffers, optimizer_state)


def demo(
    fraction: float = 0.03, bits: int | None = 4, decay: float = 0.999, chunk: int = 64, group: Group = None
) -> Plan:
    """Keep momentum on each worker, and average its largest DCT coefficients at every step (DeMo, arXiv:2411.19870).

    For `laconic.optim.DeMo`, which steps by the sign of what is delivered. The momentum is the residual: it is
    multiplied by `decay`, the gradient is added, and what was sent is subtracted. In a world of one, too.

    >>> demo().codec
    ErrorFeedback(codec=TopDCT(fraction=0.03), decay=0.999)
    """
    _check_no_group("demo", group)
    return Plan(Every(1), ErrorFeedback(TopDCT(fraction, chunk, bits), decay=decay))


def frugal(bytes: str = "60x", start: int = 1, delay: int = 0, group: Group = None) -> Plan:
    """Return the plan that sends at least so many times fewer bytes than `ddp()` in fp32, on any model.

    `attach` chooses it from the model's shapes and buffers and the kind of optimizer: gradients in 8 or 4 bits up to
    about 7.5 times; then gradients of low rank, while the rank is a large enough share of the model's width; beyond,
    streamed weight deltas in 2 bits, and above 120 times in 1 bit, each fragment every `period` steps. docs/quality.md
    has the rule and what it keeps of trainings of many kinds. From "16x" on a fragment may take effect `delay` steps
    after it was sent: its time on the link is then hidden behind these steps. Such plans send deltas alone.

    With `group`, such as "machine", the workers of a group average gradients at every step, and weight deltas go
    between the groups. The target is then for what a group sends to the others.

    >>> frugal("30x")
    frugal(bytes='30x')
    """
    from laconic.plans.targets import frugal_target  # targets.py imports this file

    return frugal_target(bytes, start, delay, _topology("frugal", group))


def few_bit_deltas() -> Codec:
    """Return the codec of weight deltas that costs nothing beside exact ones."""
    return ErrorFeedback(Quantized(2))


def _rounds(method: str, period: int | None, every: str | None, start: int, usual: int = 16) -> Schedule:
    """Return rounds of weights by steps, or by time."""
    if every is None:
        return Every(usual if period is None else period, start, of="weights")
    if period is not None:
        raise ValueError(
            f"{method}(period={period!r}, every={every!r}): a round ends after a number of steps, or after a time. "
            "Give one of them."
        )
    return Timed(seconds_in(every), start)


def _check_no_group(method: str, group: Group) -> None:
    """Refuse groups for a method that averages gradients: its codec would have to know two levels."""
    if group is not None:
        raise ValueError(
            f"{method}(group={group!r}): it averages gradients among all workers, not between groups. Use "
            f"frugal(group={group!r}) or diloco(group={group!r}), which send weights between groups. Or shard the "
            f"model inside each machine with FSDP2 (HSDP, docs/sharded.md): {method}() then encodes what machines send."
        )


def _topology(method: str, group: Group) -> Topology:
    if group is None:
        return World()
    check_group(f"{method}(group={group!r})", group)
    return Groups(group)
