"""The plans that are drawn, each with what the oracle must know of it: its own account of when and what is averaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import laconic
from laconic import ByShape, Cast, Codec, ErrorFeedback, Every, Groups, LowRank, Nesterov, Plan, Streaming
from laconic.codecs import Quantized

What = Literal["gradient", "weights"]


@dataclass(frozen=True)
class Average:
    """What is averaged at a step, in groups of `size` consecutive workers; of weights perhaps one fragment."""

    what: What
    size: int
    fragment: int | None = None


@dataclass(frozen=True)
class Known:
    """A plan, and the same once more in words of the oracle."""

    plan: Plan
    period: int = 1
    """1: gradients at every step. Else weights, every so many steps from `start` on."""
    start: int = 1
    nested: Mapping[int, int] = field(default_factory=dict)
    group: int | None = None
    outer: tuple[float, float] | None = None
    """Learning rate and momentum of the outer step; None where the mean is taken as it is."""
    fragments: int = 0
    delay: int = 0
    mix: float | None = None
    growth: float = 0.0
    lossy: float = 0.0
    """The relative error of one delivery that no residual takes up; 0 for a plan that is exact."""
    anchored: bool = False
    decay: float = 1.0
    """What is left of a residual at its next average."""
    decays_from: int = 4096
    """Of tensors of at least so many numbers."""
    wide: bool = False
    """Whether it compresses only what is large."""

    @property
    def local(self) -> bool:
        """Whether workers hold different weights after some steps."""
        return self.period > 1

    def fits(self, workers: int) -> bool:
        """Return whether so many workers can follow it."""
        sizes = [*self.nested.values(), *([self.group] if self.group else [])]
        return all(workers % size == 0 for size in sizes) and (not self.nested or sizes[-1] == workers)

    def averages(self, step: int, since: int, lr: float, workers: int) -> list[Average]:
        """List what is averaged at `step`, counted from 1. `lr` is the learning rate right after the last round."""
        if not self.local or step < self.start:
            return [Average("gradient", workers)]
        inner = [Average("gradient", self.group)] if self.group else []
        done = step - self.start + 1
        if self.nested:
            due = [size for period, size in self.nested.items() if done % period == 0]
            return [*inner, *[Average("weights", size) for size in due[-1:]]]
        if self.growth:
            period = max(self.period, int((self.growth / lr) ** 2 + 1e-9))
            due = [workers] if step - max(since, self.start - 1) >= period else []
            return [*inner, *[Average("weights", size) for size in due]]
        if self.fragments:
            place = done % self.period
            due = [fragment for fragment in range(self.fragments) if fragment * self.period // self.fragments == place]
            return [*inner, *[Average("weights", workers, fragment) for fragment in due]]
        return [*inner, *([Average("weights", workers)] if done % self.period == 0 else [])]


ROUNDING = 1e-5
"""What is lost of a delivery in fp32."""


def _gradients(codec: Codec, lossy: float, start: int = 1) -> Known:
    return Known(Plan(Every(1, start), codec), start=start, lossy=lossy)


def _deltas(period: int, codec: Codec, lossy: float, outer: tuple[float, float] | None = None) -> Known:
    plan = Plan(Every(period), codec) if outer is None else Plan(Every(period), codec, Nesterov(*outer))
    return Known(plan, period, outer=outer, lossy=lossy, anchored=True)


def _diloco(**options: Any) -> Known:
    plan = laconic.diloco(lr=0.7, momentum=0.9, codec=laconic.Exact(), **options)
    start, group = options.get("start", 1), options.get("group")
    return Known(plan, options["period"], start, group=group, outer=(0.7, 0.9), anchored=True)


def _streaming(
    period: int, fragments: int, delay: int, mix: float | None = None, group: Literal[2] | None = None
) -> Known:
    exact = laconic.Exact()
    plan = laconic.streaming_diloco(period, fragments, delay, 0.7, 0.9, codec=exact, mix=mix, group=group)
    return Known(plan, period, group=group, outer=(0.7, 0.9), fragments=fragments, delay=delay, mix=mix, anchored=True)


def _local(period: int, start: int = 1, **options: Any) -> Known:
    return Known(laconic.post_local_sgd(start, period, **options), period, start, group=options.get("group"))


def _streamed(plan: Plan, period: int, fragments: int, delay: int = 0) -> Known:
    return Known(plan, period, fragments=fragments, delay=delay, lossy=ROUNDING, anchored=True)


LOSSLESS = {
    "ddp": Known(laconic.ddp()),
    "post_local": _local(2),
    "post_local_start": _local(3, start=3),
    "post_local_groups": _local(3, group=2),
    "post_local_average": _local(2, optimizer_state="average"),
    "post_local_reset": _local(2, optimizer_state="reset"),
    "post_local_leader": _local(2, buffers="leader"),
    "post_local_keep": _local(2, buffers="keep"),
    "every": Known(Plan(Every(3)), 3),
    "diloco": _diloco(period=2),
    "diloco_start": _diloco(period=3, start=2),
    "diloco_groups": _diloco(period=2, group=2),
    "streaming": _streaming(2, 1, 0),
    "streaming_fragments": _streaming(4, 2, 0),
    "streaming_delay": _streaming(3, 1, 1),
    "streaming_delay_fragments": _streaming(4, 2, 1),
    "streaming_mix": _streaming(3, 1, 1, mix=0.5),
    "streaming_mix_fragments": _streaming(4, 2, 1, mix=0.25),
    "streaming_mix_now": _streaming(4, 2, 0, mix=0.5),
    "streaming_groups": _streaming(3, 2, 2, group=2),
    "streaming_adopt": Known(
        laconic.streaming_diloco(4, 2, 0, lr=1.0, momentum=0.0, codec=laconic.Exact()), 4, fragments=2
    ),
    "hierarchical": Known(laconic.hierarchical_sgd({1: 2, 2: 4}), 2, nested={1: 2, 2: 4}),
    "hierarchical_two": Known(laconic.hierarchical_sgd({2: 2}, start=2), 2, start=2, nested={2: 2}),
    "qsr": Known(laconic.qsr(growth=0.08, floor=2), 2, growth=0.08),
}
LOSSY = {
    "power_sgd_two": Known(laconic.power_sgd(rank=1, bits=None), lossy=ROUNDING),
    "power_sgd_alternating": Known(laconic.power_sgd(rank=2, bits=None, rounds="alternating"), lossy=ROUNDING),
    "power_sgd_start": Known(
        laconic.power_sgd(rank=1, bits=None, start=3, rounds="alternating"), start=3, lossy=ROUNDING
    ),
    "feedback_bf16": _gradients(ErrorFeedback(Cast("bf16")), lossy=0.01),
    "feedback_quantized": _gradients(ErrorFeedback(Quantized(8)), ROUNDING),
    "deltas_low_rank": _deltas(2, ByShape(ErrorFeedback(LowRank(rank=1))), ROUNDING),
    "deltas_low_rank_outer": _deltas(2, ByShape(ErrorFeedback(LowRank(rank=2))), ROUNDING, (0.7, 0.9)),
    "streamed_groups": Known(
        Plan(Streaming(3, 3, delay=1), ErrorFeedback(Quantized(4)), topology=Groups(2)),
        3,
        group=2,
        fragments=3,
        delay=1,
        lossy=ROUNDING,
        anchored=True,
    ),
    "deltas_bf16": _deltas(3, ErrorFeedback(Cast("bf16")), 0.01),
}
DEFAULTS = {
    "quantized_ddp()": Known(laconic.quantized_ddp(), lossy=ROUNDING),
    "power_sgd()": Known(laconic.power_sgd(), lossy=ROUNDING, wide=True),
    "demo()": Known(laconic.demo(), lossy=ROUNDING, decay=0.999, decays_from=1),
    "streaming_diloco(2, 2, 0)": _streamed(laconic.streaming_diloco(2, 2, 0), 2, 2),
    "streaming_diloco(4, 4, 0)": _streamed(laconic.streaming_diloco(4, 4, 0), 4, 4),
    "streaming_diloco(8, 4, 1)": _streamed(laconic.streaming_diloco(8, 4, 1), 8, 4, delay=1),
    "diloco()": Known(laconic.diloco(), 16, outer=(1.0, 0.0), lossy=ROUNDING, anchored=True),
    "streaming_diloco()": _streamed(laconic.streaming_diloco(), 16, 4, delay=1),
    "sparse_loco()": Known(
        laconic.sparse_loco(), 4, outer=(1.0, 0.0), lossy=ROUNDING, anchored=True, decay=0.95, wide=True
    ),
}
"""The plans that people use, as they are by default."""
PLANS = LOSSLESS | LOSSY | DEFAULTS


def fragments_of(sizes: Mapping[str, int], count: int) -> Sequence[Sequence[str]]:
    """Distribute parameters over fragments: the largest first, each to the fragment that is smallest so far."""
    filled = [0] * count
    parts: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        smallest = filled.index(min(filled))
        filled[smallest] += sizes[name]
        parts[smallest].append(name)
    return parts
