"""Trainings of random features, one operation after the other, held against the oracle."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.property.extras import finite, moments_of
from tests.property.invariants import check, check_delivered
from tests.property.oracle import Oracle
from tests.property.plans import PLANS, Known
from tests.property.pool import Pool
from tests.property.programs import Nan, Setup, StepOptions, possible_setup, possible_step
from tests.property.trainer import Report

FEATURES = ("batch_norm", "branch", "frozen", "tied", "bf16", "fp16", "complex", "wide")
PARAMETERS = ("mid.weight", "down.bias", "scale")

workers = st.sampled_from((2, 3, 4, 1))
setups = st.builds(
    Setup,
    plan=st.sampled_from(tuple(PLANS)),
    workers=workers,
    wrap=st.sampled_from(("bare", "ddp")),
    features=st.frozensets(st.sampled_from(FEATURES), max_size=3),
    optimizer=st.sampled_from(("sgd", "adamw")),
    split=st.booleans(),
    reversed=st.booleans(),
    amp=st.booleans(),
    scheduled=st.booleans(),
    seed=st.integers(0, 20),
    nonfinite=st.sampled_from(("skip", "exclude")),
    levels=st.booleans(),
).map(possible_setup)
nans = st.none() | st.none() | st.builds(Nan, st.integers(0, 3), st.none() | st.sampled_from(PARAMETERS))
branches = st.sampled_from(((True,) * 4, (True, False, True, True), (False, True, False, False), (False,) * 4))
steps = st.builds(StepOptions, st.sampled_from((1, 1, 2, 3)), st.none() | st.sampled_from((0.2, 1.0)), branches, nans)


class Training(RuleBasedStateMachine):
    """One training: a model on each worker of a pool, and the oracle."""

    pools: ClassVar[dict[int, Pool]] = {}

    oracle: Oracle
    setup: Setup
    plan: str = ""
    reports: list[Report]
    """Of the last operation."""
    saved: Oracle | None = None
    """As it was when the workers kept their state; None if nothing fits the model and the plan of now."""

    @initialize(setup=setups)
    def attach(self, setup: Setup) -> None:
        """Make the model, and attach the plan."""
        self.setup, self.plan = setup, setup.plan
        self.oracle = Oracle(setup)
        self.was_local = self.added = False
        self._checked(self._call("attach", setup=setup))

    def _call(self, operation: str, **arguments: Any) -> list[Any]:
        pool = self.pools.setdefault(self.setup.workers, Pool(self.setup.workers))
        replies = pool.call(operation, **arguments)
        errors = {reply.error for reply in replies}
        if errors != {""}:
            pool.close()
            traces = "\n".join(f"worker {worker}: {reply.trace}" for worker, reply in enumerate(replies))
            raise AssertionError(f"{operation} raised {sorted(errors)}\n{traces}")
        return [reply.value for reply in replies]

    def _checked(self, reports: list[Report]) -> None:
        check(self.oracle, reports)
        self.reports = reports
        if self.oracle.known.lossy or self.setup.features & {"bf16", "fp16"}:
            self.oracle.take_over(reports)

    def _sound(self) -> bool:
        tensors = [t for net in self.oracle.nets for t in (*net.parameters(), *net.buffers())]
        return all(bool(t.isfinite().all()) for t in tensors)

    def _moments_are_finite(self) -> bool:
        oracle = self.oracle
        return all(finite(moments_of(each, oracle.params(worker))) for worker, each in enumerate(oracle.optimizers))

    def _local(self) -> bool:
        return self.oracle.known.local and self.oracle.number + 1 >= self.oracle.known.start

    def recovered(self) -> None:
        """Check that no worker holds NaN any more."""
        assert self._sound(), "NaN stays on a worker, though all have synchronised"

    def _apart(self) -> bool:
        """Whether local steps have made the workers' weights different since the last round."""
        return self._local() and self.oracle.since < self.oracle.number

    @rule(options=steps)
    def step(self, options: StepOptions) -> None:
        """Take one step."""
        self._step(options)

    @rule(count=st.integers(1, 4))
    def plain_steps(self, count: int) -> None:
        """Take some steps in which nothing special happens."""
        for _ in range(count):
            self._step(StepOptions())

    def _step(self, options: StepOptions) -> None:
        gradients = not self._local() or self.oracle.known.group is not None
        options = possible_step(options, self.setup, gradients, self._sound())
        self.was_local |= not gradients
        reports = self._call("step", number=self.oracle.number + 1, options=options)
        seen = self.oracle.step(options, reports)
        check_delivered(seen, reports)
        self._checked(reports)

    @rule(plan=st.sampled_from(tuple(PLANS)))
    def change(self, plan: str) -> None:
        """Go on under another plan."""
        known = PLANS[plan]
        if not known.fits(self.setup.workers):
            return
        if self._must_refuse(known):
            found = {str(reply) for reply in self._call("change_refused", plan=plan)}
            assert len(found) == 1 and "find_unused_parameters" in found.pop(), "refused differently, or not at all"
            return
        reports = self._call("change", plan=plan)
        self.plan, self.saved = plan, None
        self.oracle.change(plan, self.reports)
        self._checked(reports)

    def _must_refuse(self, known: Known) -> bool:
        """Whether a DDP model that finds unused parameters would have to average gradients after local steps."""
        averages = not known.local or known.group is not None or self.oracle.number + 1 < known.start
        finds_unused = self.setup.wrap == "ddp" and "branch" in self.setup.features and self.setup.workers > 1
        return finds_unused and self.was_local and averages

    @rule()
    def resume(self) -> None:
        """Save, make everything anew, and load."""
        self.oracle.resume()
        self.was_local, self.saved = False, None
        self._checked(self._call("resume"))

    @rule()
    def save(self) -> None:
        """Keep the state of now."""
        self._checked(self._call("save"))
        self.saved = copy.deepcopy(self.oracle)

    @precondition(lambda self: self.saved is not None)
    @rule()
    def go_back(self) -> None:
        """Load the state that was kept, perhaps while another fragment is in flight."""
        assert self.saved is not None
        before, self.oracle = self.oracle, copy.deepcopy(self.saved)
        self.oracle.go_back(before)
        self._checked(self._call("go_back"))

    @rule()
    def average_weights(self) -> None:
        """Average the weights between two synchronisations."""
        reports = self._call("average_weights")
        self.oracle.average_weights()
        self._checked(reports)

    @rule(worker=st.integers(0, 3), name=st.sampled_from(PARAMETERS))
    def poison(self, worker: int, name: str) -> None:
        """Let a weight of one worker become NaN between two synchronisations."""
        worker %= self.setup.workers
        alone = self.setup.workers == 1 or not self._moments_are_finite()  # or no worker would be sound
        if alone or not self._apart() or self.oracle.known.group or self.setup.amp or not self._sound():
            return
        self.oracle.nets[worker].get_parameter(name).data.view(-1)[0] = torch.nan
        self._checked(self._call("poison", worker=worker, name=name))

    @precondition(lambda self: "batch_norm" in self.setup.features)
    @rule(worker=st.integers(0, 3))
    def poison_buffer(self, worker: int) -> None:
        """Let a buffer of one worker become NaN between two synchronisations."""
        worker %= self.setup.workers
        if self._apart() and self._sound() and self._moments_are_finite() and self.setup.workers > 1:
            self.oracle.nets[worker].get_buffer("norm.running_mean")[0] = torch.nan
            self._checked(self._call("poison", worker=worker, name="norm.running_mean"))

    @precondition(lambda self: not self.oracle.flights)
    @rule(factor=st.sampled_from((1.0, 0.5)))
    def load(self, factor: float) -> None:
        """Load other weights on all workers."""
        self.oracle.load(factor)
        self._checked(self._call("load", factor=factor))

    @precondition(lambda self: self.setup.wrap == "bare")
    @rule()
    def rebind(self) -> None:
        """Give every parameter new memory."""
        self._checked(self._call("rebind"))

    @precondition(lambda self: self.setup.wrap == "bare")
    @rule(trained=st.booleans(), name=st.sampled_from(("first", "mid", "down")))
    def train(self, trained: bool, name: str) -> None:
        """Freeze a module, or unfreeze it."""
        self.oracle.train(name, trained)
        self.saved = None
        self._checked(self._call("train", name=name, trained=trained))

    @precondition(lambda self: self.setup.wrap == "bare" and not self.added and not self.setup.scheduled)
    @rule()
    def add(self) -> None:
        """Add a layer, and its parameters to an optimizer."""
        self.oracle.add()
        self.added, self.saved = True, None
        self._checked(self._call("add"))

    @precondition(lambda self: self.setup.workers > 1)
    @rule(kind=st.sampled_from(("plan", "groups")))
    def refused(self, kind: str) -> None:
        """Attach to another model what cannot be right: refused on all workers, which can train without a session."""
        found = {str(reply) for reply in self._call("refused", kind=kind)}
        assert len(found) == 1 and found != {""}, f"refused differently, or not at all: {sorted(found)}"

    def teardown(self) -> None:
        """Leave the pool clean."""
        if self.plan:
            self._call("detach")
