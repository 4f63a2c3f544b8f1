"""The same training in fp64, all workers in one process, written without laconic's code.

Plans that send everything are predicted. Of a plan that does not, the oracle takes over what was delivered, after it
has checked that delivered + residual = the sum of the true gradients of the steps that were not skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.property.conservation import Conservation
from tests.property.extras import average_buffers, average_moments, finite, reset_moments
from tests.property.nets import Net, clip, learning_rate, loss_of, optimizer_of, wide
from tests.property.plans import PLANS, Average, fragments_of
from tests.property.programs import Setup, StepOptions
from tests.property.trainer import Report

Gradients = dict[str, Tensor]


@dataclass
class Flight:
    """A fragment on its way: its mean delta takes effect after step `due`."""

    due: int
    mean: Gradients


@dataclass
class Oracle:
    """Every worker's model and optimizer in fp64, and what the workers share."""

    setup: Setup
    number: int = 0
    since: int = 0
    lr: float = 0.0
    unrecorded_bytes: float = 0.0
    """What `attach` sent and did not record, where that is open."""
    averaged_steps: int = 0
    """Steps since `attach` in which gradients were averaged."""
    anchor: Gradients | None = None
    velocity: Gradients = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)
    kept: Conservation = field(default_factory=Conservation)

    def __post_init__(self) -> None:
        self.nets = [wide(Net(self.setup.features, self.setup.seed)) for _ in range(self.setup.workers)]
        self.optimizers = [optimizer_of(self.setup.optimizer, net.parameters()) for net in self.nets]
        self.begin(self.setup.plan)

    def begin(self, plan: str) -> None:
        """Follow this plan from the next step on."""
        self.known = PLANS[plan]
        self.since = max(self.number, self.known.start - 1)
        self.anchor, self.velocity, self.flights = None, {}, []
        self.kept = Conservation()
        self._set_anchor()

    @property
    def workers(self) -> int:
        return self.setup.workers

    def trained(self, worker: int = 0) -> dict[str, Tensor]:
        """Return the trained parameters of one worker, by name."""
        return {name: p for name, p in self.nets[worker].named_parameters() if p.requires_grad}

    def _set_anchor(self) -> None:
        """Keep what deltas start from, also of parameters that are trained only from now on."""
        if self.known.anchored and self.number + 1 >= self.known.start:
            self.anchor = {name: p.detach().clone() for name, p in self.trained().items()} | (self.anchor or {})

    def train(self, name: str, trained: bool) -> None:
        """Freeze a module, or unfreeze it."""
        for net in self.nets:
            net.get_submodule(name).requires_grad_(trained)
        self._set_anchor()

    def add(self) -> None:
        """Add a layer, and its parameters to the optimizer."""
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            net.add(self.setup.seed)
            assert net.added is not None
            optimizer.add_param_group({"params": list(net.added.parameters())})
        self._set_anchor()

    def step(self, options: StepOptions, reports: Sequence[Report]) -> list[Gradients | None]:
        """Take one step; return the gradients that each worker's optimizer should have seen, None where it skips."""
        self.number += 1
        if self.since == self.number - 1:
            self.lr = learning_rate(self.number - 1, self.setup.scheduled)
        averages = self.known.averages(self.number, self.since, self.lr, self.workers)
        if self.setup.wrap == "ddp" and (not self.known.local or self.number < self.known.start):
            self._share_buffers()
        self.averaged_steps += any(average.what == "gradient" for average in averages)
        own = [self._gradients(worker, options) for worker in range(self.workers)]
        seen: list[Gradients | None] = [dict(each) for each in own]
        for average in averages:
            if average.what == "gradient":
                for members in self._groups(average):
                    mean = self._mean_gradient(own, members, reports)
                    for worker in members:
                        seen[worker] = mean
        if self.setup.amp:  # a GradScaler skips what is not finite
            seen = [each if each is None or finite(each.values()) else None for each in seen]
        for worker, gradients in enumerate(seen):
            self._optimize(worker, gradients, options.clip)
        self._settle(self.number)
        for average in averages:
            if average.what == "weights":
                self._average_weights(average, reports)
        self._set_anchor()
        return seen

    def _share_buffers(self) -> None:
        for net in self.nets[1:]:
            for b, first in zip(net.buffers(), self.nets[0].buffers(), strict=True):
                b.copy_(first)

    def _groups(self, average: Average) -> Iterator[range]:
        for first in range(0, self.workers, average.size):
            yield range(first, first + average.size)

    def _gradients(self, worker: int, options: StepOptions) -> Gradients:
        net = self.nets[worker]
        net.zero_grad()
        for part in range(options.parts):
            branch = options.branch[worker]
            loss = loss_of(net, self.setup.seed, worker, self.number, part, branch, torch.float64)
            (loss / options.parts).backward()
        found = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
        if options.nan is not None and options.nan.worker == worker:
            spoiled = list(found) if options.nan.parameter is None else [options.nan.parameter]
            found |= {name: found[name] * torch.nan for name in spoiled if name in found}
        return found

    def _mean_gradient(self, own: list[Gradients], members: range, reports: Sequence[Report]) -> Gradients | None:
        """Average; a gradient that only some workers have counts as zero on the others. None: no worker steps."""
        users = range(self.workers) if self.setup.wrap == "ddp" else members  # DDP asks all workers what is used
        names = [name for name in self.trained() if any(name in own[worker] for worker in users)]
        mean = {
            name: sum((own[w][name] for w in members if name in own[w]), torch.zeros_like(self.trained()[name].data))
            / len(members)
            for name in names
        }
        if not finite(mean.values()):
            return None
        if self.known.lossy and not self.known.local and len(members) > 1:
            delivered = {name: g.to(mean[name].dtype) for name, g in reports[0].delivered.items() if name in mean}
            self.kept.add(mean, delivered)
            return delivered
        return mean

    def _optimize(self, worker: int, gradients: Gradients | None, limit: float | None) -> None:
        optimizer = self.optimizers[worker]
        if gradients is None:
            return
        own = {name: g.clone() for name, g in gradients.items()}
        if limit is not None:
            clip(own.values(), limit)
        for name, p in self.nets[worker].named_parameters():
            p.grad = own.get(name)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(self.number - 1, self.setup.scheduled)
        optimizer.step()

    def _settle(self, number: int) -> None:
        while self.flights and self.flights[0].due <= number:
            self._move(self.flights.pop(0).mean, self.known.mix)

    def _move(self, delta: Gradients, mix: float) -> None:
        """Take the outer step; the weights become the anchor, but for the share `mix` of their own."""
        assert self.anchor is not None
        lr, momentum = self.known.outer or (1.0, 0.0)
        for name, d in delta.items():
            v = self.velocity[name] = momentum * self.velocity.get(name, torch.zeros_like(d)) + d
            self.anchor[name] = self.anchor[name] - lr * (d + momentum * v)
            for worker in range(self.workers):
                p = self.trained(worker)[name]
                p.data = self.anchor[name] * (1 - mix) + p.data * mix if mix else self.anchor[name].clone()

    def _average_weights(self, average: Average, reports: Sequence[Report]) -> None:
        names = list(self.trained())
        if average.part is not None:
            sizes = {name: p.numel() for name, p in self.trained().items()}
            names = list(fragments_of(sizes, self.known.fragments)[average.part])
        for members in self._groups(average):
            sound = [w for w in members if finite(self.trained(w)[name] for name in names)]
            for worker in set(members) - set(sound):
                reset_moments(self.optimizers[worker], self.trained(worker), names)
            if self.anchor is not None and len(members) == self.workers:
                self._average_deltas(names, sound, reports)
            else:
                self._replace(self._means(names, sound), members)
            if average.part in (None, 0):
                average_buffers([self.nets[w] for w in members], [self.nets[w] for w in sound], self.known.plan.buffers)
            self._average_moments(names, members)
        if average.part is None and average.size == self.workers:
            self.since = self.number

    def _average_deltas(self, names: list[str], sound: list[int], reports: Sequence[Report]) -> None:
        assert self.anchor is not None
        delta = {name: self.anchor[name] - mean for name, mean in self._means(names, sound).items()}
        if self.known.lossy and self.workers > 1:
            after = {name: reports[0].weights[name].to(d.dtype) for name, d in delta.items()}
            delivered = self._delivered(after)
            whole = [name for name in delta if reports[0].weights[name].dtype.itemsize >= 4]  # others are rounded
            self.kept.add(
                {name: delta[name] for name in whole},
                {name: delivered[name] for name in whole},
                exact=len(sound) == self.workers,
            )
            delta = delivered
        if self.known.delay:
            self.flights.append(Flight(self.number + self.known.delay, delta))
        else:
            self._move(delta, mix=0.0)

    def _delivered(self, after: Gradients) -> Gradients:
        """Find which mean delta leads from the anchor to these weights."""
        assert self.anchor is not None
        lr, momentum = self.known.outer or (1.0, 0.0)
        return {
            name: ((self.anchor[name] - w) / lr - momentum**2 * self.velocity.get(name, torch.zeros_like(w)))
            / (1 + momentum)
            for name, w in after.items()
        }

    def _means(self, names: Iterable[str], sound: Sequence[int]) -> Gradients:
        return {name: sum((self.trained(w)[name].data for w in sound), torch.zeros(())) / len(sound) for name in names}

    def _replace(self, means: Gradients, members: Iterable[int]) -> None:
        for worker in members:
            for name, mean in means.items():
                self.trained(worker)[name].data = mean.clone()

    def _average_moments(self, names: list[str], members: range) -> None:
        """Do with the optimizers' moments what the plan has."""
        if self.known.plan.optimizer_state == "average":
            average_moments([(self.optimizers[w], self.trained(w)) for w in members], names)
        if self.known.plan.optimizer_state == "reset":
            for worker in members:
                reset_moments(self.optimizers[worker], self.trained(worker), names)

    def average_weights(self) -> None:
        """Average all weights and buffers exactly, where local steps have made them different."""
        self._settle(1 << 60)
        if self.known.local and self.number >= self.known.start and self.since != self.number:
            sound = [w for w in range(self.workers) if finite(self.trained(w).values())]
            self._replace(self._means(list(self.trained()), sound), range(self.workers))
            average_buffers(self.nets, [self.nets[w] for w in sound], "average")

    def change(self, plan: str) -> None:
        """Go on under another plan."""
        self.average_weights()
        self.begin(plan)

    def load(self, factor: float) -> None:
        """Load other weights, the same on every worker: those of a new model, scaled."""
        for net in self.nets:
            state = wide(Net(self.setup.features, self.setup.seed)).state_dict()
            net.load_state_dict(
                {name: t * factor if name.endswith("weight") else t for name, t in state.items()}, strict=False
            )
        self.anchor = None
        self._set_anchor()

    def take_over(self, reports: Sequence[Report]) -> None:
        """Go on from the weights that the workers hold, which were compared."""
        for net, report in zip(self.nets, reports, strict=True):
            for name, p in net.named_parameters():
                p.data = report.weights[name].to(p.dtype)
