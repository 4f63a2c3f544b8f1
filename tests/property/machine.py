"""Trainings of random features, one operation after the other, held against the oracle."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.property.invariants import check, check_delivered
from tests.property.open import OPEN, open_options, open_setup
from tests.property.oracle import Oracle
from tests.property.plans import PLANS
from tests.property.pool import Pool
from tests.property.programs import Nan, Setup, StepOptions
from tests.property.trainer import Report

FEATURES = ("batch_norm", "branch", "frozen", "tied", "bf16", "fp16", "complex")
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
).map(open_setup)
nans = st.none() | st.none() | st.builds(Nan, st.integers(0, 3), st.none() | st.sampled_from(PARAMETERS))
branches = st.sampled_from(((True,) * 4, (True, False, True, True), (False, True, False, False), (False,) * 4))
steps = st.builds(StepOptions, st.sampled_from((1, 1, 2, 3)), st.none() | st.sampled_from((0.2, 1.0)), branches, nans)


class Training(RuleBasedStateMachine):
    """One training: a model on each worker of a pool, and the oracle."""

    pools: ClassVar[dict[int, Pool]] = {}

    oracle: Oracle
    setup: Setup
    plan: str = ""

    @initialize(setup=setups)
    def attach(self, setup: Setup) -> None:
        """Make the model, and attach the plan."""
        self.setup, self.plan = setup, setup.plan
        self.oracle = Oracle(setup)
        self.scales_differ = self.local_steps = False
        self.added, self.trained_at_first = False, len(self.oracle.trained())
        self._attached(self._call("attach", setup=setup))

    def _attached(self, reports: list[Report]) -> None:
        if "initial_broadcast" in OPEN:
            self.oracle.unrecorded_bytes = reports[0].wire_bytes - reports[0].ledger_bytes
        self._checked(reports)

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
        if self.oracle.known.lossy or self.setup.features & {"bf16", "fp16"}:
            self.oracle.take_over(reports)

    def _sound(self) -> bool:
        return all(bool(p.isfinite().all()) for net in self.oracle.nets for p in net.parameters())

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
        options = open_options(options, self.setup, self.plan, gradients, self._sound())
        self.local_steps |= self._local()
        self.scales_differ |= options.nan is not None and not gradients and self.setup.amp
        reports = self._call("step", number=self.oracle.number + 1, options=options)
        seen = self.oracle.step(options, reports)
        check_delivered(seen, reports)
        self._checked(reports)

    @rule(plan=st.sampled_from(tuple(PLANS)))
    def change(self, plan: str) -> None:
        """Go on under another plan."""
        if not PLANS[plan].fits(self.setup.workers) or self._change_is_open(plan):
            return
        reports = self._call("change", plan=plan)
        self.plan = plan
        self.oracle.change(plan)
        self._checked(reports)

    def _change_is_open(self, plan: str) -> bool:
        known, ddp = PLANS[plan], self.setup.wrap == "ddp"
        fewer = len(self.oracle.trained()) < self.trained_at_first
        return (
            ("nan_average_weights" in OPEN and not self._sound())
            or ("freeze_local" in OPEN and known.local and fewer)
            or ("unused_feedback" in OPEN and bool(known.lossy) and fewer)
            or ("amp_feedback" in OPEN and bool(known.lossy) and ddp and self.setup.amp)
            or ("change_moments" in OPEN and self.local_steps and not known.local)
            or ("change_unused" in OPEN and ddp and self.local_steps and "branch" in self.setup.features)
            or ("amp_scales" in OPEN and ddp and self.scales_differ)
        )

    @rule()
    def resume(self) -> None:
        """Save, make everything anew, and load."""
        if "qsr_resume" in OPEN and self.oracle.known.growth:
            return
        self.oracle.averaged_steps = 0
        self._attached(self._call("resume"))

    @rule()
    def average_weights(self) -> None:
        """Average the weights between two synchronisations."""
        if "nan_average_weights" in OPEN and not self._sound():
            return
        reports = self._call("average_weights")
        self.oracle.average_weights()
        self._checked(reports)

    @rule(worker=st.integers(0, 3), name=st.sampled_from(PARAMETERS))
    def poison(self, worker: int, name: str) -> None:
        """Let a weight of one worker become NaN between two synchronisations."""
        worker %= self.setup.workers
        options = StepOptions(nan=Nan(worker))
        if not self._apart() or self.oracle.known.group or self.setup.amp or not self._sound():
            return
        if open_options(options, self.setup, self.plan, False, True).nan is None:
            return
        self.oracle.nets[worker].get_parameter(name).data.view(-1)[0] = torch.nan
        self._checked(self._call("poison", worker=worker, name=name))

    @precondition(lambda self: "nan_buffers" not in OPEN and "batch_norm" in self.setup.features)
    @rule(worker=st.integers(0, 3))
    def poison_buffer(self, worker: int) -> None:
        """Let a buffer of one worker become NaN between two synchronisations."""
        worker %= self.setup.workers
        if self._apart() and self._sound() and self.setup.workers > 1:
            self.oracle.nets[worker].get_buffer("norm.running_mean")[0] = torch.nan
            self._checked(self._call("poison", worker=worker, name="norm.running_mean"))

    @precondition(lambda self: "load" not in OPEN and not self.oracle.flights)
    @rule(factor=st.sampled_from((1.0, 0.5)))
    def load(self, factor: float) -> None:
        """Load other weights on all workers."""
        self.oracle.load(factor)
        self._checked(self._call("load", factor=factor))

    @precondition(lambda self: "rebind" not in OPEN and self.setup.wrap == "bare")
    @rule()
    def rebind(self) -> None:
        """Give every parameter new memory."""
        self._checked(self._call("rebind"))

    @precondition(lambda self: self.setup.wrap == "bare")
    @rule(trained=st.booleans(), name=st.sampled_from(("first", "mid", "down")))
    def train(self, trained: bool, name: str) -> None:
        """Freeze a module, or unfreeze it."""
        module = self.oracle.nets[0].get_submodule(name)
        if "unfreeze" in OPEN and trained and not all(p.requires_grad for p in module.parameters()):
            return
        known = self.oracle.known
        if ("freeze_local" in OPEN and known.local) or ("unused_feedback" in OPEN and known.lossy):
            return
        self.oracle.train(name, trained)
        self._checked(self._call("train", name=name, trained=trained))

    @precondition(lambda self: "add" not in OPEN and self.setup.wrap == "bare" and not self.added)
    @rule()
    def add(self) -> None:
        """Add a layer, and its parameters to an optimizer."""
        self.oracle.add()
        self.added = True
        self._checked(self._call("add"))

    @precondition(lambda self: self.setup.workers > 1)
    @rule(kind=st.sampled_from(("plan", "groups", "fragments")))
    def refused(self, kind: str) -> None:
        """Attach to another model what cannot be right: refused on all workers, which can train without a session."""
        if kind == "fragments" and "refused_late" in OPEN:
            return
        found = {str(reply) for reply in self._call("refused", kind=kind)}
        assert len(found) == 1 and found != {""}, f"refused differently, or not at all: {sorted(found)}"

    def teardown(self) -> None:
        """Leave the pool clean."""
        if self.plan:
            self._call("detach")
