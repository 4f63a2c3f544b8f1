"""Plans that are named by a target of bytes, and become plans of ranks or periods when the model is known.

    plan = frugal(bytes="60x")      # prints as this
    plan.resolved(facts)            # streaming_diloco(period=4, fragments=4, delay=0), of a model of large tensors

`attach`, `session.change`, `sent_bytes` and the planner resolve a plan before they use it. What it becomes depends on
`ModelFacts` alone, which all workers share. `frugal_on` is the rule of `frugal`: the one place to change it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from laconic.codecs import ErrorFeedback, LowRank, Quantized
from laconic.codecs.quantized import width
from laconic.plans.methods import frugal, power_sgd, quantized_ddp
from laconic.plans.plan import Plan
from laconic.plans.schedules import Every, Streaming
from laconic.plans.topology import Topology
from laconic.values import call

Kind: TypeAlias = Literal["adaptive", "sgd", "muon"]
"""How an optimizer scales gradients: each number by its own history, as Adam does; not at all; or matrices as a whole.
"""
LEAST_RANK, LEAST_SHARE, LEAST_SHARE_UNDER_SGD = 4, 1 / 20, 1 / 6
"""Below this rank, or share of the model's width, deltas keep more of a training than gradients of low rank."""
WIDE = 256
"""From this width on deltas keep more than gradients in less than 4 bits (docs/quality.md)."""
THIN_BLOCK = 256
"""As many numbers share a scale in 1 bit: small tensors are padded to whole blocks."""


@dataclass(frozen=True, eq=False)
class ModelFacts:
    """What a target of bytes is resolved from: what is trained, by what, among how many workers.

    `tensors` are the trained tensors, `buffers` all buffers, both without memory. `bytes_of` is what a worker sends at
    a step under a plan, on average.
    """

    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    optimizers: tuple[Kind, ...]
    workers: int
    bytes_of: Callable[[Plan], float]

    @property
    def ddp_bytes(self) -> int:
        """What `ddp()` sends at a step in fp32: targets count from it."""
        return 8 * (self.workers - 1) * sum(t.numel() for t in self.tensors.values()) // self.workers

    def times(self, plan: Plan) -> float:
        """Return how many times fewer bytes than `ddp()` in fp32 a plan sends."""
        sent = self.bytes_of(plan)
        return self.ddp_bytes / sent if sent else float("inf")


@dataclass(frozen=True, repr=False)
class TargetPlan(Plan):
    """A plan that `choose` finds when the model is known. Until then, schedule and codec are those of large tensors.

    It prints as `call`, and equals a plan of the same call.
    """

    call: str = ""
    choose: Callable[[ModelFacts], Plan] = field(default=lambda facts: Plan(), compare=False)

    def resolved(self, facts: ModelFacts) -> Plan:
        """Return the plan that meets the target on this model."""
        if facts.ddp_bytes == 0:  # nothing is trained
            return Plan(self.schedule, self.codec, topology=self.topology)
        return self.choose(facts)

    def __repr__(self) -> str:
        return self.call


def width_of(tensors: Mapping[str, Tensor]) -> float:
    """Return the width of a model: the mean of the smaller sides of its matrices, by their numbers.

    >>> import torch
    >>> width_of({"up": torch.empty(512, 128), "bias": torch.empty(512)})
    128.0
    """
    matrices = [t for t in tensors.values() if t.dim() > 1 and t.numel()]
    numbers = sum(t.numel() for t in matrices)
    logs = (t.numel() * math.log2(min(t.shape[0], t[0].numel())) for t in matrices)
    return 2 ** (sum(logs) / numbers) if numbers else 1.0


def frugal_target(bytes: str, start: int, delay: int, topology: Topology) -> Plan:
    """Return `frugal`, to be resolved."""
    times = _times("frugal", bytes)
    choose = partial(frugal_on, times=times, start=start, delay=delay, topology=topology)
    if delay and _least_period(times) == 1:
        raise ValueError(
            f"frugal(bytes={bytes!r}, delay={delay!r}): what is sent whole at every step cannot be late. "
            'Use delay=0, or from "16x" on, where each step sends a fragment.'
        )
    like = choose(_LARGE_MATRIX)
    given = _call(frugal, bytes, {"start": start, "delay": delay, "group": topology.inner})
    return TargetPlan(like.schedule, like.codec, topology=like.topology, call=given, choose=choose)


def power_sgd_target(bytes: str, options: Mapping[str, Any]) -> Plan:
    """Return `power_sgd` of so many bytes, to be resolved."""
    times = _times("power_sgd", bytes)
    like = power_sgd(1, **options)
    choose = partial(power_sgd_on, times=times, bytes=bytes, **options)
    return TargetPlan(like.schedule, like.codec, call=_call(power_sgd, bytes, options), choose=choose)


def frugal_on(facts: ModelFacts, times: float, start: int, delay: int, topology: Topology) -> Plan:
    """Return what `frugal` becomes on a model: the rule of docs/quality.md.

    It must send at least `times` times fewer bytes than `ddp()` on every model, as `facts.bytes_of` counts them.
    """
    # 1. Gradients, if few bits are enough. With groups, only weights go between them.
    gradients = not delay and topology.inner is None
    for bits in (8, 4) if gradients else ():
        plan = quantized_ddp(bits, start=start)
        if facts.times(plan) >= times:
            return plan
    # 2. Gradients of low rank, if the rank is high enough. Averaged steps lose more: each worker's Adam or Muon scales
    # a step by the noise of its own gradients, and under SGD workers diverge.
    width = width_of(facts.tensors)
    if gradients:
        rank = largest_rank(facts, times, start=start)
        if rank >= max(LEAST_RANK, width * (LEAST_SHARE_UNDER_SGD if "sgd" in facts.optimizers else LEAST_SHARE)):
            return power_sgd(rank, start=start)
    # 3. Of thin matrices, such as LoRA's, gradients in 2 bits or 1.
    if gradients and width < WIDE and "sgd" not in facts.optimizers:
        for plan in (quantized_ddp(2, start=start), quantized_ddp(1, THIN_BLOCK, start)):
            if facts.times(plan) >= times:
                return plan
    # 4. Weight deltas, with the shortest period that is long enough.
    codec = ErrorFeedback(_deltas(times))

    def of_period(period: int) -> Plan:
        if period == 1:
            return Plan(Every(1, start, of="weights"), codec, topology=topology)
        return Plan(Streaming(period, min(period, 4), delay, start=start), codec, topology=topology)

    period = _least_period(times)
    while (found := facts.times(of_period(period))) < times:  # from period 4 on, each round sends the same bytes
        period = max(period + 1, int(period * times / found)) if period >= 4 else period + 1
    return of_period(period)


def largest_rank(facts: ModelFacts, times: float, **options: Any) -> int:
    """Return the largest rank with which `power_sgd` meets a target; 0 if rank 1 does not."""
    shapes = [(t.shape[0], t[0].numel()) for t in facts.tensors.values() if t.dim() > 1 and t.numel()]
    most = max(map(min, shapes), default=1)  # from this rank on LowRank declines every matrix
    # More ranks are more bytes. So bisect for the first of 1, 2, ..., most that sends too many.
    return bisect_left(range(1, most + 1), True, key=lambda each: facts.times(power_sgd(each, **options)) < times)


def power_sgd_on(facts: ModelFacts, times: float, bytes: str, **options: Any) -> Plan:
    """Return `power_sgd` with the largest rank that meets a target; a ValueError if rank 1 does not."""
    rank = largest_rank(facts, times, **options)
    if rank:
        return power_sgd(rank, **options)
    least = power_sgd(1, **options)
    small = [t for t in facts.tensors.values() if not LowRank(1, options["min_compression"]).accepts(t.shape)]
    share = sum(t.numel() for t in small) / sum(t.numel() for t in facts.tensors.values())
    raise ValueError(
        f"{_call(power_sgd, bytes, options)}: even rank 1 sends only {facts.times(least):.3g} times fewer bytes than "
        f"ddp() on this model. Its matrices are small or thin, or too few: {share:.0%} of its numbers are in tensors "
        f"that are not sent as factors. Use frugal(bytes={bytes!r}), which sends so much less on any model."
    )


def _times(method: str, bytes: object) -> float:
    text = bytes if isinstance(bytes, str) else ""
    number = text.removesuffix("x")
    if text == number or not number.replace(".", "", 1).isdigit() or float(number) < 1:
        raise ValueError(f'{method}(bytes={bytes!r}): write how many times fewer bytes than DDP: "60x", at least "1x".')
    return float(number)


def _call(method: Callable[..., Plan], bytes: str, options: Mapping[str, object]) -> str:
    """Return the call that a target prints as, without options that have their defaults."""
    parameters = signature(method).parameters
    shown = {name: value for name, value in options.items() if value != parameters[name].default}
    return call(method.__name__, {"bytes": bytes} | shown)


def _deltas(times: float) -> Quantized:
    """Return the codec of frugal's weight deltas."""
    return Quantized(2) if times <= 120 else Quantized(1, block=4096)


def _least_period(times: float) -> int:
    """Return frugal's period on a model of large tensors; no model has a shorter one."""
    codec = _deltas(times)
    return math.ceil(times * width(codec.block, codec.bits) / (4 * codec.block))


def _bytes_of_large_matrix(plan: Plan) -> float:
    """Return what one of two workers sends of a matrix of 4096 rows and columns, without rounding up."""
    codec: Any = plan.codec
    while hasattr(codec, "codec"):
        codec = codec.codec
    numbers, block = (codec.rank * 8192, 128) if isinstance(codec, LowRank) else (4096**2, codec.block)
    return numbers / block * width(block, codec.bits or 32) / plan.schedule.period


_LARGE_MATRIX = ModelFacts({"": torch.empty(4096, 4096, device="meta")}, {}, ("adaptive",), 2, _bytes_of_large_matrix)
"""What a target stands for until it is resolved: schedule and codec on a model of large matrices."""
