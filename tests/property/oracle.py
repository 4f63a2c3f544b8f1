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
from tests.property.extras import (
    average_buffers,
    average_moments,
    equal_counters,
    finite,
    moments_of,
    reset_moments,
    share_buffers,
)
from tests.property.nets import Net, clip, learning_rate, loss_of, optimizer_of, wide
from tests.property.plans import PLANS, Average, fragments_of
from tests.property.programs import Setup, StepOptions
from tests.property.trainer import Report

Gradients = dict[str, Tensor]


@dataclass
class Flight:
    """A fragment on its way: its mean delta takes effect after step `due`. `sent` is what each worker held before."""

    due: int
    mean: Gradients
    sent: list[Gradients]


@dataclass
class Carried:
    """A residual that the plan before left: it is added to the next gradients in this many equal parts."""

    rest: Tensor
    parts: int = 32

    def next(self) -> Tensor:
        """Return the next part."""
        return self.rest / self.parts

    def deliver(self) -> None:
        """Count the next part as delivered."""
        self.rest, self.parts = self.rest - self.next(), self.parts - 1


@dataclass
class Oracle:
    """Every worker's model and optimizer in fp64, and what the workers share."""

    setup: Setup
    number: int = 0
    since: int = 0
    lr: float = 0.0
    averaged_steps: int = 0
    """Steps since `attach` in which gradients were averaged."""
    anchor: Gradients | None = None
    current: bool = False
    """Whether the last round set the weights to the anchor, and nothing happened since."""
    loaded: bool = False
    unsynced: set[str] = field(default_factory=set)
    """Parameters that are trained since the last round among all workers: averaged exactly in the next."""
    velocity: Gradients = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)
    kept: Conservation = field(default_factory=Conservation)
    residual: Gradients = field(default_factory=dict)
    """The mean of the workers' residuals after the last operation."""
    carried: list[dict[str, Carried]] = field(default_factory=list)
    """By worker: residuals of gradients that the plan before left."""

    def __post_init__(self) -> None:
        self.nets = [wide(Net(self.setup.features, self.setup.seed)) for _ in range(self.setup.workers)]
        self.optimizers = [optimizer_of(self.setup.optimizer, net.parameters()) for net in self.nets]
        self.followed = set(self.trained())
        """The parameters that are trained, or were since the last round among all workers."""
        self.begin(self.setup.plan)

    def begin(self, plan: str) -> None:
        """Follow this plan from the next step on."""
        self.known = PLANS[plan]
        self.since = max(self.number, self.known.start - 1)
        self.anchor, self.velocity, self.flights = None, {}, []
        self.current = False
        self.kept, self.residual = Conservation(), {}
        self.carried = [{} for _ in range(self.workers)]

    @property
    def workers(self) -> int:
        return self.setup.workers

    def trained(self, worker: int = 0) -> dict[str, Tensor]:
        """Return the trained parameters of one worker, by name."""
        return {name: p for name, p in self.nets[worker].named_parameters() if p.requires_grad}

    def params(self, worker: int = 0) -> dict[str, Tensor]:
        """Return the parameters of one worker that weights are averaged of, by name."""
        return {name: p for name, p in self.nets[worker].named_parameters() if name in self.followed}

    def _begin_step(self) -> None:
        """Let deltas start from the weights before the first step, or from those that were loaded after a round."""
        if self.known.anchored and self.number + 1 >= self.known.start:
            if self.anchor is None or (self.current and self.loaded):
                self.anchor = {name: p.detach().clone() for name, p in self.params().items()}
            self.current = False
        self.loaded = False

    def train(self, name: str, trained: bool) -> None:
        """Freeze a module, or unfreeze it."""
        for net in self.nets:
            net.get_submodule(name).requires_grad_(trained)
        self._follow()

    def add(self) -> None:
        """Add a layer, and its parameters to the optimizer."""
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            net.add(self.setup.seed)
            assert net.added is not None
            optimizer.add_param_group({"params": list(net.added.parameters())})
        self._follow()

    def _follow(self) -> None:
        new = set(self.trained()) - self.followed
        self.followed |= new
        self.unsynced |= new

    def _synced(self, names: Iterable[str]) -> None:
        """Note that all workers have averaged these weights: those that are frozen are left alone from now on."""
        self.unsynced -= set(names)
        for name in set(names) - set(self.trained()):
            self.followed.remove(name)
            self.velocity.pop(name, None)
            self.kept.forget(name)

    def step(self, options: StepOptions, reports: Sequence[Report]) -> list[Gradients | None]:
        """Take one step; return the gradients that each worker's optimizer should have seen, None where it skips."""
        self._begin_step()
        self.number += 1
        if self.since == self.number - 1:
            self.lr = learning_rate(self.number - 1, self.setup.scheduled)
        averages = self.known.averages(self.number, self.since, self.lr, self.workers)
        self.averaged_steps += any(average.what == "gradient" for average in averages)
        own = [self._gradients(worker, options) for worker in range(self.workers)]
        seen: list[Gradients | None] = [dict(each) for each in own]
        for average in averages:
            if average.what == "gradient":
                if average.size == self.workers:
                    self.unsynced.clear()
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
        if self.setup.wrap == "ddp" and (not self.known.local or self.number < self.known.start):
            share_buffers(self.nets)
        return seen

    def _groups(self, average: Average) -> Iterator[range]:
        groups = self.workers // average.size
        for group in range(groups):
            if self.setup.levels:
                yield range(group, self.workers, groups)
            else:
                yield range(group * average.size, (group + 1) * average.size)

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
        """Average; a gradient that only some workers have counts as zero on the others. None: no worker steps.

        Where the others go on without a worker that has NaN, it contributes nothing but its residuals.
        """
        sound: Sequence[int] = [w for w in members if finite(own[w].values())]
        if self.setup.nonfinite == "skip" or not sound:
            sound = members
        users = range(self.workers) if self.setup.wrap == "ddp" else members  # DDP asks all workers what is used
        names = [name for name in self.trained() if any(name in own[worker] for worker in users)]
        mean = {
            name: sum((own[w][name] for w in sound if name in own[w]), torch.zeros_like(self.trained()[name].data))
            / len(sound)
            for name in names
        }
        if not finite(mean.values()):
            return None
        encodes = len(members) > 1 or self.known.decay < 1  # a worker alone keeps its momentum
        if self.known.lossy and not self.known.local and encodes:
            delivered = {name: g.to(mean[name].dtype) for name, g in reports[0].delivered.items() if name in mean}
            self.kept.add(mean, delivered, forgotten=self._forgotten(mean))
            return delivered
        for worker in members:
            for name, carried in self.carried[worker].items():
                if name in mean:
                    mean[name] = mean[name] + carried.next() / len(members)
                    carried.deliver()
            self.carried[worker] = {name: each for name, each in self.carried[worker].items() if each.parts}
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
            flight = self.flights.pop(0)
            self._move(flight.mean, self.known.mix, flight.sent)

    def _move(self, delta: Gradients, mix: float | None, sent: Sequence[Gradients] = ()) -> None:
        """Take the outer step; the weights become the anchor, but for the share `mix` of their own.

        Where `mix` is None, each worker adds what its weights have moved since they were sent.
        """
        assert self.anchor is not None
        lr, momentum = self.known.outer or (1.0, 0.0)
        for name, d in delta.items():
            v = self.velocity[name] = momentum * self.velocity.get(name, torch.zeros_like(d)) + d
            self.anchor[name] = self.anchor[name] - lr * (d + momentum * v)
            for worker in range(self.workers):
                p = self.params(worker)[name]
                own = p.data - sent[worker][name] if mix is None else mix * (p.data - self.anchor[name])
                p.data = self.anchor[name] + own

    def _average_weights(self, average: Average, reports: Sequence[Report]) -> None:
        plan, first, among_all = self.known.plan, average.fragment in (None, 0), average.size == self.workers
        names = list(self.params())
        if average.fragment is not None:
            sizes = {name: p.numel() for name, p in self.params().items()}
            names = list(fragments_of(sizes, self.known.fragments)[average.fragment])
        buffers, moments = plan.buffers if first else "keep", first and plan.optimizer_state == "average"
        for members in self._groups(average):
            sound = self._leave_out(members, buffers, moments)
            if self.anchor is not None and among_all:
                names = self._average_anchored(names, sound, reports)
                self.current = average.fragment is None
            else:  # NaN is in all fragments after one more step
                names = names if len(sound) == len(members) else list(self.params())
                self._replace(self._means(names, sound), members)
            average_buffers([self.nets[w] for w in members], [self.nets[w] for w in sound], buffers)
            if moments:
                self._average_moments(members, sound)
            if plan.optimizer_state == "reset":
                for worker in members:
                    reset_moments(self.optimizers[worker], self.params(worker), names)
        if among_all:
            self._synced(names)
        if average.fragment is None and among_all:
            self.since = self.number

    def _leave_out(self, members: range, buffers: str, moments: bool) -> list[int]:
        """Return the workers whose numbers are finite. The others lose the state of their optimizers."""
        sound = [w for w in members if self._is_sound(w, buffers, moments)]
        for worker in set(members) - set(sound):
            if not moments:
                reset_moments(self.optimizers[worker], self.params(worker), self.followed)
        return sound

    def _is_sound(self, worker: int, buffers: str, moments: bool) -> bool:
        looked_at = list(self.params(worker).values())
        if buffers != "keep":
            looked_at += self.nets[worker].buffers()
        if moments:
            looked_at += moments_of(self.optimizers[worker], self.params(worker))
        return finite(looked_at)

    def _average_moments(self, members: Iterable[int], sound: Sequence[int]) -> list[str]:
        return average_moments({w: (self.optimizers[w], self.params(w)) for w in members}, sound, self.params())

    def _average_anchored(self, names: list[str], sound: list[int], reports: Sequence[Report]) -> list[str]:
        """Take the outer step with the mean delta of the workers that are sound; the others go back to the anchor.

        Parameters that were not trained in the whole round are averaged exactly: of the fragment, or of all fragments
        where a worker is not sound. Return what all workers have averaged.
        """
        assert self.anchor is not None
        trained = self.trained()
        whole = [name for name in trained if name in self.anchor and name not in self.unsynced]
        among = names if len(sound) == self.workers else list(self.params())
        means = self._means([name for name in among if name not in whole], sound)
        for worker in set(range(self.workers)) - set(sound):
            for name in whole:
                self.params(worker)[name].data = self.anchor[name].clone()
            for flight in self.flights:
                flight.sent[worker] = self._own(worker, flight.sent[worker])
        deltas = [name for name in names if name not in means]
        self._average_deltas(deltas, sound, reports)
        self._replace(means, range(self.workers))
        self.anchor |= {name: mean.clone() for name, mean in means.items()}
        return [*deltas, *means]

    def _average_deltas(self, names: list[str], sound: list[int], reports: Sequence[Report]) -> None:
        assert self.anchor is not None
        delta = {name: self.anchor[name] - mean for name, mean in self._means(names, sound).items()}
        if self.known.lossy and self.workers > 1:
            if self.known.delay:
                delivered = {name: reports[0].flying[name].to(d.dtype) for name, d in delta.items()}
            else:
                after = {name: reports[0].weights[name].to(d.dtype) for name, d in delta.items()}
                delivered = self._delivered(after)
            whole = [name for name in delta if reports[0].weights[name].dtype.itemsize >= 4]  # others are rounded
            self.kept.add(
                {name: delta[name] for name in whole},
                {name: delivered[name] for name in whole},
                exact=len(sound) == self.workers,
                forgotten=self._forgotten(whole),
            )
            delta = delivered
        if self.known.delay:
            sent = [self._own(worker, delta) for worker in range(self.workers)]
            self.flights.append(Flight(self.number + self.known.delay, delta, sent))
        else:
            self._move(delta, mix=self.known.mix or 0.0)

    def _forgotten(self, names: Iterable[str]) -> Gradients:
        """Return what a decay takes from the residuals before they are sent again, in the mean of the workers."""
        large = [name for name in names if self.params()[name].numel() >= self.known.decays_from]
        decaying = [name for name in large if name in self.residual]
        return {name: (1 - self.known.decay) * self.residual[name] for name in decaying}

    def _own(self, worker: int, names: Iterable[str]) -> Gradients:
        return {name: p.detach().clone() for name, p in self.params(worker).items() if name in set(names)}

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
        return {name: sum((self.params(w)[name].data for w in sound), torch.zeros(())) / len(sound) for name in names}

    def _replace(self, means: Gradients, members: Iterable[int]) -> None:
        for worker in members:
            for name, mean in means.items():
                self.params(worker)[name].data = mean.clone()

    def average_weights(self, moments: bool = False, force: bool = False) -> None:
        """Average all weights and buffers exactly, where local steps have made them different, and perhaps moments."""
        self._settle(1 << 60)
        different = moments or force or self.since != self.number
        if not self.known.local or self.number < self.known.start or not different:
            return
        everyone = range(self.workers)
        sound = self._leave_out(everyone, "average", moments)
        self._replace(self._means(list(self.params()), sound), everyone)
        average_buffers(self.nets, [self.nets[w] for w in sound], "average")
        if moments:
            shared = self._average_moments(everyone, sound)
            for name in self.followed - set(shared):
                for worker in everyone:
                    reset_moments(self.optimizers[worker], self.params(worker), [name])
            equal_counters([(self.optimizers[w], self.params(w)) for w in everyone], shared)
        self._synced(list(self.params()))

    def change(self, plan: str, before: Sequence[Report]) -> None:
        """Go on under another plan. Where its next step averages gradients, the moments must be equal, too.

        What the workers held back is not lost: of deltas, each worker moves by its own residual before the weights are
        averaged; of gradients, the next gradients take it up.
        """
        following = PLANS[plan].averages(self.number + 1, self.number, learning_rate(0, False), self.workers)
        gradients = any(average.what == "gradient" for average in following)
        of_deltas = bool(self.known.lossy) and self.known.local
        if of_deltas:
            for worker, report in enumerate(before):
                for name, r in report.residual.items():
                    self.params(worker)[name].data -= r
        of_gradients = [report.carried if self.known.local else report.residual for report in before]
        self.average_weights(moments=gradients, force=of_deltas)
        self.begin(plan)
        if gradients:
            residuals = [
                {name: r.to(self.params(w)[name].dtype) for name, r in each.items()}
                for w, each in enumerate(of_gradients)
            ]
            self.carried = [{name: Carried(r) for name, r in residual.items()} for residual in residuals]
            if not self.known.local:
                means = {name: torch.stack([each[name] for each in residuals]).mean(0) for name in residuals[0]}
                self.kept.add(means, {})

    def resume(self) -> None:
        """Go on where all was saved. Without an anchor, the next takes in all parameters, those that came late too."""
        self.averaged_steps, self.current = 0, False
        if self.anchor is None:
            self.unsynced.clear()

    def go_back(self, now: Oracle) -> None:
        """Go on from here after `now`: collectives count on, and deltas start from the anchor that was loaded."""
        self.averaged_steps, self.current = now.averaged_steps, False

    def load(self, factor: float) -> None:
        """Load other weights, the same on every worker: those of a new model, scaled."""
        for net in self.nets:
            state = wide(Net(self.setup.features, self.setup.seed)).state_dict()
            net.load_state_dict(
                {name: t * factor if name.endswith("weight") else t for name, t in state.items()}, strict=False
            )
        self.loaded = True

    def take_over(self, reports: Sequence[Report]) -> None:
        """Go on from the weights that the workers hold, which were compared."""
        names = reports[0].residual
        self.residual = {name: torch.stack([r.residual[name] for r in reports]).mean(0) for name in names}
        for net, report in zip(self.nets, reports, strict=True):
            for name, p in net.named_parameters():
                p.data = report.weights[name].to(p.dtype)
