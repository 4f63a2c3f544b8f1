"""One worker of the pool: a model, its optimizers and a session, and the operations that the test draws."""

from __future__ import annotations

import contextlib
import copy
import io
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

import laconic
from tests.property.nets import Net, learning_rate, loss_of, optimizer_of
from tests.property.plans import PLANS
from tests.property.programs import Setup, StepOptions
from tests.property.wire import Wire

Tree = dict[str, Any]

TIMEOUT_S = 30.0
"""How long a worker waits for the others; `pool.LIMIT_S` is longer."""


@dataclass
class Report:
    """What a worker holds after an operation."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    delivered: dict[str, Tensor]
    """The gradients that the optimizers saw in the last step, before clipping; empty where it was skipped."""
    residual: dict[str, Tensor]
    """What the plan's codec keeps of what it averages."""
    carried: dict[str, Tensor]
    """What a plan that averages weights keeps of gradients: residuals of the plan before, which groups deliver."""
    flying: dict[str, Tensor]
    """The mean deltas of fragments that were sent and have not taken effect."""
    step: int
    synced: bool
    in_flight: bool
    ledger_bytes: int
    bytes_of: dict[str, int]
    """The same by phase."""
    wire_bytes: float
    collectives: int
    ddp_collectives: int
    """Collectives in DDP's own group since `attach`."""


@dataclass
class Trainer:
    """Runs the operations on one worker."""

    worker: int
    setup: Setup = field(default_factory=Setup)
    session: laconic.Session | None = None

    def __post_init__(self) -> None:
        self.wire = Wire()
        self.delivered: dict[str, Tensor] = {}
        self._pairs: list[dist.ProcessGroup] = []
        self._saved: list[Any] = []

    def attach(self, setup: Setup) -> Report:
        """Make a model and attach the plan to it."""
        self.detach()
        self.setup = setup
        self._make(setup.seed)
        self._attach(setup.plan)
        return self.report()

    def _make(self, seed: int) -> None:
        setup = self.setup
        self.net = Net(setup.features, seed)
        self.model: nn.Module = self.net
        if setup.wrap == "ddp":
            self.model = DDP(
                self.net,
                bucket_cap_mb=0.002,
                find_unused_parameters="branch" in setup.features,
            )
        params = list(self.net.parameters())
        shares = [params[::2], params[1::2]] if setup.split else [params]
        self.optimizers: list[Optimizer] = [optimizer_of(setup.optimizer, share) for share in shares]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=setup.amp)
        self.schedulers: list[LRScheduler] = []
        if setup.scheduled:
            ratio = [lambda step: learning_rate(step, True) / learning_rate(0, True)]
            self.schedulers = [torch.optim.lr_scheduler.LambdaLR(each, ratio[0]) for each in self.optimizers]

    def _attach(self, plan: str) -> None:
        self.wire.sent, self.wire.collectives = 0.0, 0
        scaler = self.scaler if self.setup.amp else None
        self.session = laconic.attach(
            PLANS[plan].plan,
            self.model,
            self.optimizers,
            timeout_s=TIMEOUT_S,
            scaler=scaler,
            nonfinite=self.setup.nonfinite,
            levels=self._levels() if self.setup.levels else None,
        )
        self._ddp_before = self._ddp_sequence()  # in which the session's own group has exchanged addresses
        self.handles = [each.register_step_pre_hook(self._note_delivered) for each in self.optimizers]

    def _levels(self) -> list[dist.ProcessGroup]:
        """Return this worker's group of two, and that of all."""
        if not self._pairs:
            self._pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
        assert dist.group.WORLD is not None
        return [self._pairs[self.worker % 2], dist.group.WORLD]

    def detach(self) -> None:
        """Leave the model."""
        if self.session is not None:
            self.session.detach()
            for handle in self.handles:
                handle.remove()
            self.session = None

    def step(self, number: int, options: StepOptions) -> Report:
        """Take one step of training."""
        assert self.session is not None
        self.delivered, self._noted = {}, False
        nan = options.nan if options.nan is not None and options.nan.worker == self.worker else None
        hook = None
        if nan is not None and nan.parameter is not None:
            p = self.net.get_parameter(nan.parameter)
            if p.requires_grad:
                hook = p.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))
        for part in range(options.parts):
            last = part == options.parts - 1
            with self.model.no_sync() if isinstance(self.model, DDP) and not last else contextlib.nullcontext():
                branch = options.branch[self.worker]
                loss = loss_of(self.model, self.setup.seed, self.worker, number, part, branch, torch.float32)
                loss = loss / options.parts * (torch.nan if nan is not None and nan.parameter is None else 1.0)
                self.scaler.scale(loss).backward()
        if hook is not None:
            hook.remove()
        if options.clip is not None:
            self._clip(options.clip)
        for each in reversed(self.optimizers) if self.setup.reversed else self.optimizers:
            self.scaler.step(each)
        self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        for each in self.optimizers:
            each.zero_grad()
        return self.report()

    def _clip(self, limit: float) -> None:
        assert self.session is not None
        for each in self.optimizers:
            self.scaler.unscale_(each)
        self.session.average_gradients()
        for each in self.optimizers:
            self._note(each)
        self._noted = True
        nn.utils.clip_grad_norm_(self.net.parameters(), limit)

    def _note_delivered(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        ours = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        if self._noted:  # before clipping: a step that is skipped delivers nothing
            names = [name for name, p in self.net.named_parameters() if p.grad is None]
            self.delivered = {name: g for name, g in self.delivered.items() if name not in names}
        elif ours:
            self._note(optimizer)

    def _note(self, optimizer: Optimizer) -> None:
        ours = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in self.net.named_parameters():
            if id(p) in ours and p.grad is not None:
                self.delivered[name] = p.grad.detach().clone()

    def resume(self) -> Report:
        """Save all state, make everything anew from another seed, and load."""
        assert self.session is not None
        saved = [_through_a_file(part.state_dict()) for part in self._parts()]
        plan = self.session.plan
        name = next(name for name, known in PLANS.items() if known.plan == plan)
        frozen = [name for name, p in self.net.named_parameters() if not p.requires_grad]
        added = self.net.added is not None
        self.detach()
        self._make(self.setup.seed + 1000)
        if added:
            self._add()
        for parameter, p in self.net.named_parameters():
            p.requires_grad_(parameter not in frozen)
        self._attach(name)
        for part, state in zip(self._parts(), saved, strict=True):
            part.load_state_dict(state)
        return self.report()

    def _parts(self) -> list[Any]:
        """Return all that has state."""
        return [self.net, *self.optimizers, *self.schedulers, self.scaler, self.session]

    def save(self) -> Report:
        """Keep all state as it is now."""
        self._saved = [_through_a_file(part.state_dict()) for part in self._parts()]
        return self.report()

    def go_back(self) -> Report:
        """Load what was kept, into what is there."""
        for part, state in zip(self._parts(), self._saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        return self.report()

    def change(self, plan: str) -> Report:
        """Go on under another plan."""
        assert self.session is not None
        self.session.change(PLANS[plan].plan)
        self.setup = replace(self.setup, plan=plan)
        return self.report()

    def change_refused(self, plan: str) -> str:
        """Try to go on under another plan; return what the refusal says."""
        assert self.session is not None
        try:
            self.session.change(PLANS[plan].plan)
        except ValueError as error:
            return str(error)
        return ""

    def average_weights(self) -> Report:
        """Average the weights between two synchronisations."""
        assert self.session is not None
        self.session.average_weights()
        return self.report()

    def poison(self, worker: int, name: str) -> Report:
        """Let one weight or buffer of one worker become NaN."""
        if worker == self.worker:
            tensors = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
            with torch.no_grad():
                tensors[name].view(-1)[0] = torch.nan
        return self.report()

    def train(self, name: str, trained: bool) -> Report:
        """Freeze a module, or unfreeze it."""
        self.net.get_submodule(name).requires_grad_(trained)
        return self.report()

    def rebind(self) -> Report:
        """Give every parameter new memory, as `vector_to_parameters` and `model.to(...)` do."""
        for p in self.net.parameters():
            p.data = p.data.clone()
        return self.report()

    def load(self, factor: float) -> Report:
        """Load other weights, the same on every worker: those of a new model, scaled."""
        state = Net(self.setup.features, self.setup.seed).state_dict()
        loaded = {name: t * factor if name.endswith("weight") else t for name, t in state.items()}
        self.net.load_state_dict(loaded, strict=False)
        return self.report()

    def add(self) -> Report:
        """Add a layer, and its parameters to the last optimizer."""
        self._add()
        return self.report()

    def _add(self) -> None:
        self.net.add(self.setup.seed)
        assert self.net.added is not None
        self.optimizers[-1].add_param_group({"params": list(self.net.added.parameters())})

    def refused(self, kind: str) -> str:
        """Attach what cannot be right to another model; return the error's class. The optimizer must work after it."""
        counted, before = (self.wire.sent, self.wire.collectives), self._ddp_sequence()
        net = Net(frozenset(), seed=0)
        optimizer = optimizer_of("sgd", net.parameters())
        plan = laconic.power_sgd(rank=1 + (self.worker == 0))
        if kind == "groups":
            plan = laconic.post_local_sgd(group=5)
        error = ""
        try:
            laconic.attach(plan, net, optimizer, timeout_s=TIMEOUT_S).detach()
        except Exception as raised:
            error = type(raised).__name__
        loss_of(net, 0, self.worker, 0, 0, False, torch.float32).backward()
        optimizer.step()
        self.wire.sent, self.wire.collectives = counted  # another session's
        self._ddp_before += self._ddp_sequence() - before
        return error

    def report(self) -> Report:
        """Say what this worker holds."""
        session = self.session
        assert session is not None
        saved = session.state_dict()
        return Report(
            {name: p.detach().clone() for name, p in self.net.named_parameters()},
            {name: b.detach().clone() for name, b in self.net.named_buffers()},
            self.delivered,
            self._residuals(saved["state"], "weights" if session.plan.local else "gradient"),
            self._residuals(saved["state"], "gradient") if session.plan.local else {},
            self._flying(saved["in_flight"]),
            session.step,
            session.synced,
            session.in_flight,
            session.ledger.wire_bytes,
            {phase: totals.wire_bytes for phase, totals in session.ledger.totals(by="phase").items()},
            self.wire.sent,
            self.wire.collectives,
            self._ddp_sequence() - self._ddp_before,
        )

    def _residuals(self, state: Tree, phase: str) -> dict[str, Tensor]:
        """Return the residuals by parameter, without the loss scale, which those of a DDP model contain."""
        scale = state.get("loss_scale", {}).get("scale", 1.0) if phase == "gradient" else 1.0
        return {name: self._as_parameter(name, t / scale) for name, t in _residuals(state[phase]).items()}

    def _flying(self, fragments: list[Tree]) -> dict[str, Tensor]:
        means = {name: t for each in fragments for mean in each["means"] for name, t in mean.items()}
        return {name: self._as_parameter(name, t) for name, t in means.items()}

    def _as_parameter(self, name: str, t: Tensor) -> Tensor:
        return torch.view_as_complex(t.clone()) if self.net.get_parameter(name).is_complex() else t

    def _ddp_sequence(self) -> int:
        group: Any = dist.group.WORLD
        number: int = group._get_sequence_number_for_group()
        return number


def _residuals(tree: Tree) -> dict[str, Tensor]:
    """Find the residuals in the state of a codec, by parameter: what it keeps, and what the plan before left."""
    found: dict[str, Tensor] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            for name, t in (value if key == "residual" else _residuals(value)).items():
                found[name] = found[name] + t if name in found else t
    return found


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
