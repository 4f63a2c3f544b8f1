"""Measures computation, while all workers compute: a codec's own, a copy in memory, the parts of a training step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from laconic import alone, attach
from laconic.codecs.routing import routed
from laconic.comm.averaging import write
from laconic.exchange import AllToAll, Averaged, Decide, Exchange, Gather, Request, State, drive
from laconic.packing import bucketed, in_parts, pack, unpack
from laconic.plans.plan import Plan
from laconic.plans.schedules import Streaming
from laconic.tools.planner.meter import Meter
from laconic.tools.planner.probe_data import CodecTiming, CopyTiming, StepTiming

LEAST_REPEATS, MOST_REPEATS, REPEAT_S = 5, 40, 1.0
"""What is measured is repeated for about REPEAT_S, within these limits."""
WARM_UPS = 2
COPY_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}

Buckets = list[dict[str, Tensor]]


def time_codec(
    meter: Meter, plan: Plan, shapes: Mapping[str, Sequence[int]], repeat_s: float = REPEAT_S
) -> CodecTiming:
    """Measure what a plan computes by itself to average each tensor of these shapes once, among all workers.

    The codec runs on tensors of random numbers. No request is sent: each is answered as if all workers had equal
    tensors, and the time that this takes does not count.
    """
    generator = torch.Generator().manual_seed(meter.worker)
    drawn = {name: torch.randn(tuple(shape), generator=generator).to(meter.device) for name, shape in shapes.items()}
    state: dict[str, State] = {"codec": {}, "outer": {}}
    anchor = {name: torch.zeros_like(t) for name, t in drawn.items()} if plan.local else {}

    def once() -> float:
        if not plan.local:
            return sum(_gradients_s(meter, plan, bucket, state) for bucket in _in_ddp_buckets(drawn))
        parts = in_parts(drawn, plan.schedule.fragments) if plan.schedule.fragments > 1 else [list(drawn)]
        weights = {name: t.clone() for name, t in drawn.items()}
        fragments = [bucketed({name: weights[name] for name in names}) for names in parts]
        return sum(_weights_s(meter, plan, b, anchor, state) for buckets in fragments for b in buckets)

    with torch.no_grad():
        return CodecTiming(repr(plan), meter.mean(_repeat(meter, once, repeat_s)))


def _in_ddp_buckets(tensors: Mapping[str, Tensor]) -> Buckets:
    """Copy tensors into buckets that lie side by side in memory, as DDP's do."""
    return [unpack(pack(bucket), like=bucket) for bucket in bucketed(tensors)]


def _gradients_s(meter: Meter, plan: Plan, bucket: dict[str, Tensor], state: dict[str, State]) -> float:
    spent_s, end = own_seconds(meter, routed(plan.codec).average(bucket, state["codec"], meter.world.peers, reuse=True))
    start = meter.now()
    if end.mean is not bucket:
        write(bucket, end.mean)
    return spent_s + meter.now() - start


def _weights_s(
    meter: Meter, plan: Plan, weights: dict[str, Tensor], anchor: dict[str, Tensor], state: dict[str, State]
) -> float:
    """Average deltas, take the outer step and write the weights, as a synchronisation does."""
    start = meter.now()
    own = {name: anchor[name] - t for name, t in weights.items()} if plan.needs_anchor else weights
    spent_s = meter.now() - start
    codec_s, end = own_seconds(meter, routed(plan.codec).average(own, state["codec"], meter.world.peers, reuse=True))
    start = meter.now()
    if plan.needs_anchor:
        here = {name: anchor[name] for name in weights}
        plan.outer.step(here, end.mean, state["outer"])
        late = isinstance(plan.schedule, Streaming) and plan.schedule.delay  # both ways of `mix` cost about the same
        write(weights, {name: torch.lerp(a, weights[name], 0.5) for name, a in here.items()} if late else here)
    else:
        write(weights, end.mean)
    return spent_s + codec_s + meter.now() - start


def own_seconds(meter: Meter, exchange: Exchange[Averaged]) -> tuple[float, Averaged]:
    """Run an exchange to its end without a network, and return the seconds of its own computation."""
    served_s = 0.0

    def serve(request: Request | Decide) -> Tensor:
        nonlocal served_s
        asked = meter.now()
        answer = _answer(request, meter)
        served_s += meter.now() - asked
        return answer

    start = meter.now()
    end = drive(exchange, serve)
    return meter.now() - start - served_s, end


def _answer(request: Request | Decide, meter: Meter) -> Tensor:
    """Answer a request as if all workers had sent this worker's tensor."""
    if isinstance(request, Decide):
        return request.ok
    x = request.x
    if isinstance(request, AllToAll):
        first = sum(request.rows[: meter.worker])
        x = x[first : first + request.rows[meter.worker]]
    if isinstance(request, Gather | AllToAll):
        return x.expand(meter.workers, *x.shape).contiguous()
    return x


def time_copy(meter: Meter) -> CopyTiming:
    """Measure a copy in the memory of the device."""
    size = COPY_BYTES[meter.device.type]
    source = torch.zeros(size, dtype=torch.uint8, device=meter.device)
    target = torch.empty_like(source)

    def once() -> float:
        start = meter.now()
        target.copy_(source)
        return meter.now() - start

    return CopyTiming(size, meter.mean(_repeat(meter, once)))


def time_step(meter: Meter, model: nn.Module, loss: Callable[[], Tensor]) -> StepTiming:
    """Measure forward, backward and the optimizer's step of a model under `alone()`, which synchronises nothing."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with attach(alone(), model, optimizer):
        parts = [_step_s(meter, optimizer, loss) for _ in range(WARM_UPS)]
        (slowest_s,) = meter.slowest([sum(parts[-1])])
        meter.start_together()
        parts = [_step_s(meter, optimizer, loss) for _ in range(_repeats(3 * REPEAT_S, slowest_s))]
    whole = [sum(each) for each in parts]
    forward, backward, step = (meter.mean([each[i] for each in parts]) for i in range(3))
    return StepTiming(meter.mean(whole), forward, backward, step, meter.medians(whole))


def _step_s(meter: Meter, optimizer: Optimizer, loss: Callable[[], Tensor]) -> tuple[float, float, float]:
    marks = [meter.now()]
    value = loss()
    marks.append(meter.now())
    value.backward()
    marks.append(meter.now())
    optimizer.step()
    optimizer.zero_grad()
    marks.append(meter.now())
    forward, backward, step = (end - start for start, end in pairwise(marks))
    return forward, backward, step


def _repeat(meter: Meter, once: Callable[[], float], repeat_s: float = REPEAT_S) -> list[float]:
    """Repeat after a warm-up, on all workers at the same time and equally often."""
    took_s = [once() for _ in range(WARM_UPS)][-1]
    repeats = _repeats(repeat_s, meter.slowest([took_s])[0])
    meter.start_together()
    return [once() for _ in range(repeats)]


def _repeats(seconds: float, each_s: float) -> int:
    return min(MOST_REPEATS, max(LEAST_REPEATS, int(seconds / max(each_s, 1e-6))))
