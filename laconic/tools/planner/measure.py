"""What a probe measures, on real workers: collectives, the computation of codecs, a training step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from laconic.codecs.routing import routed
from laconic.comm.averaging import write
from laconic.comm.groups import Levels
from laconic.cost import facts_of
from laconic.exchange import (
    AllToAll,
    Averaged,
    Decide,
    Exchange,
    Gather,
    Mean,
    Request,
    State,
    drive,
)
from laconic.ledger import Ledger, wire_bytes
from laconic.packing import bucketed, in_fragments, pack, unpack
from laconic.plans.methods import alone
from laconic.plans.plan import Plan
from laconic.plans.schedules import Streaming
from laconic.session.attach import attach
from laconic.tools.machine import host_id
from laconic.tools.planner.probe_data import MACHINE, WORLD, CodecTiming, StepTiming, Timing

TIMEOUT_S = 120.0
HOST_BYTES = 256
"""Of the text that names a host."""
SIZES, SMALLEST_BYTES, MOST_BYTES = 6, 1 << 10, 32 << 20
"""How many sizes of a collective are measured, the smallest payload, and what a worker sends at most."""
COLLECTIVE_REPEATS, COLLECTIVE_S = (3, 10), 0.5
COMPUTE_REPEATS, COMPUTE_S = (5, 40), 1.0
"""What is measured is repeated for about so many seconds, within these limits."""
WARM_UPS = 2


class Meter:
    """Measures on the default process group, whose workers all call the same methods.

    `device` is where the model computes, `wire` where the tensors of collectives are. `groups` are the sizes of the
    groups of neighbours that are measured besides all workers, and besides those of one machine.
    """

    def __init__(self, device: torch.device, wire: torch.device, groups: Sequence[int] = ()) -> None:
        self.device, self.wire = device, wire
        self.worker, self.workers = dist.get_rank(), dist.get_world_size()
        self._queues = Levels([None], dist.group.WORLD, Ledger(keep=0), timeout_s=TIMEOUT_S, device=wire)
        self.world = self._queues.world
        self.hosts = self._hosts()
        self.levels = self._levels(groups)
        self._queues.prepare([*sorted(size for size in self.levels.values() if size < self.workers), None])

    def _hosts(self) -> list[list[int]]:
        """The workers of each host."""
        text = host_id().encode()[-HOST_BYTES:].ljust(HOST_BYTES)
        ids = [bytes(row.tolist()) for row in self.world.gather(torch.tensor(list(text), dtype=torch.uint8))]
        return [[worker for worker, each in enumerate(ids) if each == host] for host in dict.fromkeys(ids)]

    def _levels(self, groups: Sequence[int]) -> dict[str, int]:
        """The size of the groups of each level, by name, all workers last; a machine is one if all have as many."""
        each = len(self.hosts[0])
        in_order = [worker for host in self.hosts for worker in host] == list(range(self.workers))
        found = {}
        if 1 < each < self.workers and in_order and {len(host) for host in self.hosts} == {each}:
            found[MACHINE] = each
        found |= {f"groups of {size}": size for size in sorted(set(groups) - {each}) if 1 < size < self.workers}
        return found | ({WORLD: self.workers} if self.workers > 1 else {})

    def run(self, request: Request, workers: int) -> None:
        """Run a collective in groups of this size, through the queue that also serves training."""
        self._queues[workers].run(_exchange(request), "probe")

    def now(self) -> float:
        """Return the time, when the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def start_together(self) -> None:
        """Wait for all workers."""
        self.world.gather(torch.zeros(1))

    def slowest(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the largest of all workers' values, one by one."""
        return tuple(self.all(seconds).amax(0).tolist())

    def mean(self, seconds: Sequence[float]) -> tuple[float, ...]:
        """Return the mean of all workers' values, one by one."""
        return tuple(self.all(seconds).mean(0).tolist())

    def all(self, values: Sequence[float]) -> Tensor:
        """Return the values of all workers, [workers, values]."""
        return self.world.gather(torch.tensor(values, dtype=torch.float64))

    def close(self) -> None:
        """End the queues."""
        self._queues.close()


def devices() -> tuple[torch.device, torch.device]:
    """Choose where this worker computes, and where the tensors of its collectives are.

    Collectives of CUDA tensors need a device for each worker (NCCL).
    """
    if not torch.cuda.is_available():
        return torch.device("cpu"), torch.device("cpu")
    here, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % found)
    return device, device if here <= found and dist.is_nccl_available() else torch.device("cpu")


# 1. Collectives.


def time_collective(meter: Meter, op: str, level: str, longest_s: float) -> list[Timing]:
    """Measure a collective at six sizes, up to the one that takes about `longest_s`, in all groups at the same time."""
    workers = meter.levels[level]
    largest = _largest_bytes(meter, op, workers, longest_s)
    return [
        Timing(op, level, workers, size, _samples(meter, op, workers, size))
        for size in sizes(largest, step=4 * workers)
    ]


def sizes(largest: int, step: int) -> list[int]:
    """Return six sizes with equal ratios, multiples of `step`.

    >>> sizes(1 << 20, step=16)
    [1024, 4096, 16384, 65536, 262144, 1048576]
    """
    ratio = (max(largest, 2 * SMALLEST_BYTES) / SMALLEST_BYTES) ** (1 / (SIZES - 1))
    return [max(1, round(SMALLEST_BYTES * ratio**i / step)) * step for i in range(SIZES)]


def _largest_bytes(meter: Meter, op: str, workers: int, longest_s: float) -> int:
    """Find the payload that takes `longest_s`, or of which a worker sends MOST_BYTES. This also warms up."""
    size, most = SMALLEST_BYTES, MOST_BYTES * SMALLEST_BYTES // max(1, wire_bytes(op, SMALLEST_BYTES, workers))
    while True:
        (took_s,) = meter.slowest([_collective_s(meter, op, workers, size)])
        if took_s > longest_s / 2 or size >= most:
            return int(min(most, size * longest_s / took_s))
        size = min(most, 4 * size)


def _samples(meter: Meter, op: str, workers: int, size: int) -> tuple[float, ...]:
    first = meter.slowest([_collective_s(meter, op, workers, size)])
    repeats = _repeats(COLLECTIVE_S, first[0], COLLECTIVE_REPEATS) - 1
    return first + meter.slowest([_collective_s(meter, op, workers, size) for _ in range(repeats)])


def _collective_s(meter: Meter, op: str, workers: int, size: int) -> float:
    # an all_to_all needs as many numbers for each worker
    x = torch.zeros(max(workers, size // (4 * workers) * workers), device=meter.wire)
    if op == "all_to_all":
        request: Request = AllToAll(x, (len(x) // workers,) * workers)
    else:
        request = Mean(x) if op == "all_reduce" else Gather(x)
    meter.start_together()
    start = meter.now()
    meter.run(request, workers)
    return meter.now() - start


def _exchange(request: Request) -> Exchange[None]:
    yield request


# 2. Codecs.


def time_codec(
    meter: Meter, plan: Plan, shapes: Mapping[str, Sequence[int]], repeat_s: float = COMPUTE_S
) -> CodecTiming:
    """Measure what a plan computes by itself to average each tensor of these shapes once, while all workers do.

    The codec runs on tensors of random numbers. Nothing is sent: each request is answered as if all workers had equal
    tensors, and the time that this takes does not count.
    """
    asked, plan = plan, plan.resolved(facts_of(shapes, meter.workers))
    generator = torch.Generator().manual_seed(meter.worker)
    drawn = {name: torch.randn(tuple(shape), generator=generator).to(meter.device) for name, shape in shapes.items()}
    state: dict[str, State] = {"codec": {}, "outer": {}}
    anchor = {name: torch.zeros_like(t) for name, t in drawn.items()} if plan.local else {}

    def once() -> float:
        if not plan.local:  # gradients lie side by side in memory in each of DDP's buckets
            buckets = [unpack(pack(bucket), like=bucket) for bucket in bucketed(drawn)]
            return sum(_gradients_s(meter, plan, bucket, state) for bucket in buckets)
        fragments = in_fragments(drawn, plan.schedule.fragments) if plan.schedule.fragments > 1 else [list(drawn)]
        weights = {name: t.clone() for name, t in drawn.items()}
        buckets = [each for names in fragments for each in bucketed({name: weights[name] for name in names})]
        return sum(_weights_s(meter, plan, bucket, anchor, state) for bucket in buckets)

    with torch.no_grad():
        return CodecTiming(repr(asked), meter.mean(_repeat(meter, once, repeat_s)))


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
    if isinstance(request, AllToAll):  # this worker's rows
        first = sum(request.rows[: meter.worker])
        x = x[first : first + request.rows[meter.worker]]
    if isinstance(request, Gather | AllToAll):
        return x.expand(meter.workers, *x.shape).contiguous()
    return x


# 3. The training step.


def time_step(meter: Meter, model: nn.Module, loss: Callable[[], Tensor]) -> StepTiming:
    """Measure forward, backward and the optimizer's step of a model under `alone()`, which synchronises nothing."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with attach(alone(), model, optimizer):
        steps = [_step_s(meter, optimizer, loss) for _ in range(WARM_UPS)]
        (slowest_s,) = meter.slowest([sum(steps[-1])])
        meter.start_together()
        steps = [_step_s(meter, optimizer, loss) for _ in range(_repeats(3 * COMPUTE_S, slowest_s))]
    whole = [sum(each) for each in steps]
    forward, backward, step = (meter.mean([each[i] for each in steps]) for i in range(3))
    return StepTiming(meter.mean(whole), forward, backward, step, tuple(meter.all(whole).quantile(0.5, dim=1).tolist()))


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


def _repeat(meter: Meter, once: Callable[[], float], repeat_s: float) -> list[float]:
    """Repeat after a warm-up, on all workers at the same time and equally often."""
    took_s = [once() for _ in range(WARM_UPS)][-1]
    repeats = _repeats(repeat_s, meter.slowest([took_s])[0])
    meter.start_together()
    return [once() for _ in range(repeats)]


def _repeats(seconds: float, each_s: float, limits: tuple[int, int] = COMPUTE_REPEATS) -> int:
    least, most = limits
    return min(most, max(least, int(seconds / max(each_s, 1e-6))))
