"""Puts a plan on a model and an optimizer. The only file that installs hooks.

    talk = laconic.attach(laconic.power_sgd(rank=4), model, optimizer)

The training loop does not change. On a DDP model, gradients travel through DDP's communication hook, overlapped
with backward; on a bare module, at the optimizer's step. Weights are averaged right after the optimizer's step.
In steps of silence nothing travels at all, DDP's own broadcasts included.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.channel import channel_from_env
from laconic.ledger import Ledger
from laconic.plans import Plan
from laconic.replica import Replica
from laconic.scaling import LossScaling
from laconic.schedules import Payload
from laconic.wires.group import Conductor, resolved

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


class _Handle(Protocol):
    def remove(self) -> None: ...


def attach(
    plan: Plan,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    group: dist.ProcessGroup | None = None,
    ledger: Ledger | None = None,
) -> Talk:
    """Let the workers that hold copies of `model` agree as `plan` says.

    Every worker calls it with the same plan. `model` is a DDP model or a bare module, compiled or not; `optimizer`
    is one, or several that step one after the other: a step is over when the last of them has stepped.
    `group` are the workers that agree, by default DDP's group or the world. Without torch.distributed it is a
    world of one, where nothing is sent.
    """
    return Talk(plan, model, optimizer, group, ledger)


class Talk:
    """A plan at work. A context manager: leaving it detaches."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        group: dist.ProcessGroup | None,
        ledger: Ledger | None,
    ) -> None:
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        _check(plan, model, optimizers)
        self.plan = plan
        self.step = 0
        """Optimizer steps since `attach`."""
        self._channel = channel_from_env()
        if ledger is None:
            ledger = Ledger() if self._channel is None else self._channel.ledger
        self.ledger = ledger
        ddp = _find_ddp(model)
        # Weakly: DDP holds its hook and so this talk, and a cycle through C++ would never be collected.
        self._ddp_if_any = None if ddp is None else weakref.ref(ddp)
        conductor = Conductor(_group(ddp, group), self.ledger)
        self._replica = Replica(ddp.module if ddp else model, conductor)
        self._gradients_ready = False
        self._scalings = [LossScaling(each) for each in optimizers]
        self._handles: list[_Handle] = [
            optimizers[0].register_step_pre_hook(self._before_step),
            *(scaling.attach() for scaling in self._scalings),
            optimizers[-1].register_step_post_hook(self._after_step),
        ]
        if self._ddp is None:
            self._replica.broadcast()
        else:
            _dispatcher(self._ddp).talk = self
        self._prepare()
        if self._channel is not None:
            trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            self._channel.start(repr(plan), ledger, _group(self._ddp, group), trained)

    @property
    def _ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp_if_any is None else self._ddp_if_any()

    @property
    def workers(self) -> int:
        """How many workers agree."""
        return self._replica.conductor.workers

    def average_gradients(self) -> None:
        """On a bare module: average the gradients now instead of at the optimizer's step.

        For what must see the averaged gradients before the step, such as clipping by norm.
        """
        talk = self.plan.at(self.step + 1)
        if self._ddp is None and talk is not None and talk[0] is Payload.GRADIENT and not self._gradients_ready:
            for scaling in self._scalings:
                scaling.unscale()
            self._replica.average_gradients(talk[1])
            for scaling in self._scalings:
                scaling.agree()
            self._gradients_ready = True

    def skip(self) -> None:
        """Count a step without calling the optimizer, for loops that skip an update on this worker only.

        The other workers may be about to average weights, and this one must be there. Steps that a GradScaler
        skips are seen without this call.
        """
        if self._ddp is None:
            self.average_gradients()
        self._finish_step()

    def report(self, *, loss: float | Tensor, tokens: int = 0) -> bool:
        """Tell `laconic compare`, if it runs this training, the loss of a step; returns whether it has seen enough.

        Call it after each step, or each few, on every worker. `tokens` are what the step learned from on this worker.
        Run by anything else, it does nothing and is False.
        """
        return self._channel is not None and self._channel.report(self.step, loss, tokens)

    def change(self, plan: Plan) -> None:
        """Go on with another plan from the next step. Every worker calls it after the same step.

        Weights that local steps have driven apart are averaged first; what the old codec owed is dropped.
        """
        if not isinstance(plan, Plan):
            raise TypeError(f"change({plan!r}): a Plan is needed, such as laconic.power_sgd(rank=4).")
        if self.plan.local and self.plan.at(self.step) is None:
            self._replica.anchor = None
            self._replica.average_weights(self.plan)
        self.plan = plan
        self._replica.state = {"gradient": {}, "weights": {}, "outer": {}}
        self._replica.anchor = None
        self._prepare()

    def detach(self) -> None:
        """Take all hooks off. A DDP model then averages gradients as DDP does."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._ddp is not None and _dispatcher(self._ddp).talk is self:
            _dispatcher(self._ddp).talk = None
            _dispatcher(self._ddp).let_talk(self._ddp, True)
        self._replica.conductor.close()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def state_dict(self) -> dict[str, Any]:
        """What this worker must save besides model and optimizer. Each worker saves its own."""
        return {"plan": repr(self.plan), "step": self.step, **self._replica.state_dict()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. The plan must be the one that was saved."""
        if saved["plan"] != repr(self.plan):
            raise ValueError(
                f"this state was saved under {saved['plan']} and the plan is {self.plan!r}: what one codec owes means "
                f"nothing to another. Attach laconic.plan({saved['plan']!r}), load, then change(...) to the new plan."
            )
        self.step = saved["step"]
        self._replica.load_state_dict(saved)
        self._prepare()

    def __enter__(self) -> Talk:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def __repr__(self) -> str:
        return f"<Talk {self.plan!r} at step {self.step}, {self.workers} workers>"

    def _prepare(self) -> None:
        """Get ready for the next step: whether DDP talks in it, and where deltas start from."""
        talk = self.plan.at(self.step + 1)
        self.ledger.step = self.step + 1
        self._gradients_ready = False
        if self._ddp is not None:
            _dispatcher(self._ddp).let_talk(self._ddp, talk is not None and talk[0] is Payload.GRADIENT)
        begun = self.step + 1 >= self.plan.schedule.start
        if begun and self.plan.needs_anchor and self._replica.anchor is None:
            self._replica.drop_anchor()

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        talk = self.plan.at(self.step + 1)
        if self._ddp is not None or talk is None or talk[0] is not Payload.GRADIENT:
            return
        if (len(args) > 1 and args[1] is not None) or kwargs.get("closure") is not None:
            raise RuntimeError(
                "optimizer.step(closure) computes gradients inside the step, where a bare module cannot average them. "
                "Wrap the model in DistributedDataParallel, or call backward before optimizer.step()."
            )
        self.average_gradients()

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._finish_step()

    def _finish_step(self) -> None:
        self.step += 1
        talk = self.plan.at(self.step)
        if talk is not None and talk[0] is Payload.WEIGHTS:
            self._replica.average_weights(self.plan)
        self._prepare()

    def _average_bucket(self, bucket: GradBucket) -> Future[Tensor]:
        talk = self.plan.at(self.step + 1)
        if talk is None or talk[0] is not Payload.GRADIENT:
            return resolved(bucket.buffer())
        return self._replica.average_bucket(
            talk[1], bucket.parameters(), bucket.gradients(), bucket.buffer(), bucket.is_last()
        )


class _Dispatcher:
    """DDP takes one hook in its life; this one forwards to whichever talk is attached, or averages as DDP does."""

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.talk: Talk | None = None
        self.group: dist.ProcessGroup = ddp.process_group
        self._broadcast_buffers = ddp.broadcast_buffers

    def let_talk(self, ddp: DistributedDataParallel, allowed: bool) -> None:
        """In a step of silence DDP must not talk either: not its buckets, its bitmap, nor its buffers."""
        ddp.broadcast_buffers = allowed and self._broadcast_buffers
        if not ddp.static_graph:  # which must see every backward; its buckets come to us and stay
            ddp.require_backward_grad_sync = allowed

    def __call__(self, bucket: GradBucket) -> Future[Tensor]:
        if self.talk is not None:
            return self.talk._average_bucket(bucket)
        flat = bucket.buffer().div_(self.group.size())
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        future: Future[Any] = work.get_future()
        return future.then(lambda f: f.value()[0])


# Without annotations, as DDP compares them to its own classes and these are strings here.
def _forward_bucket(dispatcher, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return dispatcher(bucket)


_dispatchers: weakref.WeakKeyDictionary[DistributedDataParallel, _Dispatcher] = weakref.WeakKeyDictionary()


def _dispatcher(ddp: DistributedDataParallel) -> _Dispatcher:
    known = _dispatchers.get(ddp)
    if known is None:
        known = _Dispatcher(ddp)
        try:
            ddp.register_comm_hook(known, _forward_bucket)
        except RuntimeError as error:
            raise RuntimeError(
                "attach: this DDP model already has a communication hook, and DDP takes only one. "
                "Make the model anew without register_comm_hook; the plan says how gradients travel."
            ) from error
        _dispatchers[ddp] = known
    return known


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    while isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile wraps
        model = model._orig_mod  # type: ignore[assignment]
    return model if isinstance(model, DistributedDataParallel) else None


def _group(ddp: DistributedDataParallel | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if group is not None:
        return group
    if ddp is not None:
        found: dist.ProcessGroup = ddp.process_group
        return found
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _check(plan: Plan, model: nn.Module, optimizers: list[Optimizer]) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(
            f"attach({plan!r}, ...): the first argument is a Plan, such as laconic.power_sgd(rank=4). "
            "From text: laconic.plan('power_sgd(rank=4)')."
        )
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"attach(plan, {type(model).__name__}, ...): the second argument is the model, a torch.nn.Module."
        )
    if not optimizers or not all(isinstance(each, Optimizer) for each in optimizers):
        raise TypeError(
            "attach(plan, model, optimizer): a torch.optim.Optimizer is needed, or several in a list, "
            f"not {[type(each).__name__ for each in optimizers]}."
        )
    ours = {id(p) for p in model.parameters()}
    for each in optimizers:
        if not any(id(p) in ours for group in each.param_groups for p in group["params"]):
            raise ValueError(
                f"attach: {type(each).__name__} holds none of the model's parameters: its steps are not the model's. "
                "Make the optimizer from model.parameters(), after moving the model to its device."
            )
