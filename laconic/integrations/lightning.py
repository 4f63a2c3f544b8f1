"""Lightning's Trainer: a callback that attaches a plan when training starts, and saves every worker's state.

    trainer = Trainer(strategy="ddp", callbacks=[Laconic("power_sgd(rank=32)")])
    trainer.fit(model, ckpt_path="last")

Under Fabric no callback is needed: `laconic.attach(plan, model, optimizer)` takes what `fabric.setup` returns.

**What is saved, and where.** Lightning writes one file, on worker 0, with worker 0's state. But residuals of error
feedback differ between workers, and under local plans so do weights and optimizer state. So the callback gathers at
worker 0 what differs from worker 0's own, and puts it into Lightning's own file. A file of each worker beside it would
send nothing, but it could be there without the others: `ModelCheckpoint` would not delete, link, rename or upload it,
and on machines without a shared disk a restart could give a worker the file of another. One file is whole or not there
at all, works with `save_top_k`, `save_last` and remote file systems, and is the one that Lightning reads on every
worker. The price is what a save sends: for error feedback the gradients' size from each worker; under local plans also
weights and moments (`session.ledger.totals(by="phase")["checkpoint"]`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import laconic
from laconic import Plan, Session, StepObserver
from laconic.checkpoint import resize as resize_states
from laconic.checkpoint.gathering import gather_states
from laconic.integrations import worker_files

logger = logging.getLogger("laconic.lightning")

KEY = "laconic"
"""Where the state is in a checkpoint of Lightning."""


class Laconic(Callback):  # type: ignore[misc]
    """Synchronises the workers of a Trainer as a plan says, and makes its checkpoints hold every worker's state.

    It attaches when training starts, with all of the Trainer's optimizers and its GradScaler, and detaches when `fit`
    ends, also after an error. `session` is the session, for its ledger, and None before. It works with automatic and
    manual optimization, accumulated batches, gradient clipping, and mixed precision.

    Args:
        plan: A plan, or its text, such as "power_sgd(rank=32)".
        attach: What attaches the plan, for options: `functools.partial(laconic.attach, clip_norm=1.0)`.
        resize: Resume from a checkpoint of another number of workers: their residuals are divided among those that are
            there, and keep their "sum" or their "mean", as in `laconic.checkpoint.resize`. None refuses.
    """

    def __init__(
        self,
        plan: Plan | str,
        *,
        attach: Callable[..., Session] = laconic.attach,
        resize: worker_files.Resize | None = None,
    ) -> None:
        worker_files.check_resize("Laconic", resize)
        self.plan = laconic.plan(plan) if isinstance(plan, str) else plan
        self.session: Session | None = None
        self._attach, self._resize = attach, resize
        self._restored: Mapping[str, Any] | None = None
        """What this worker loads when training starts."""
        self._last: dict[str, Any] | None = None
        """The state of the session when it was detached, for a checkpoint that is saved after `fit`."""
        self._flag: _SyncFlag | None = None
        self._said_what_saving_sends = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse strategies that average by other means."""
        if stage == "fit":
            self._last = self._restored = None
            check_strategy(trainer.strategy)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the plan: the model, its optimizers and their state are there by now."""
        scaler = _scaler_of(trainer)
        saved, self._restored = self._restored, None
        text = repr(self.plan) if saved is None else saved["session"]["plan"]
        plan = self.plan if text == repr(self.plan) else laconic.plan(text)
        model = trainer.strategy.model
        plan.check_by_steps("Laconic")
        self.session = self._attach(plan, model, trainer.strategy.optimizers, scaler=scaler)
        if saved is not None:
            _load(saved, trainer, pl_module, self.session)
            if saved["given"] != repr(self.plan):  # not one that a guard or auto() has chosen: the user's own wish
                self.session.change(self.plan)
        if isinstance(model, DistributedDataParallel) and not pl_module.automatic_optimization:
            self._flag = _SyncFlag(model)
            self.session.observe(self._flag)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Keep DDP from sending in local steps of manual optimization."""
        if self._flag is not None:
            self._flag.restore()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Average the gradients of a bare module: Lightning clips them next. DDP has done so in backward."""
        unscaled = _scaler_of(trainer) is None or not any(group.get("fused") for group in optimizer.param_groups)
        if self.session is not None and unscaled:  # fused optimizers unscale in their step: average them there
            self.session.average_gradients(optimizer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Detach. A checkpoint that is saved because of an error has no workers' state: others may not be there."""
        self._detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Detach when `fit` ends."""
        if self.session is not None and self.session.attached:
            self._last = self.session.state_dict()
        self._detach()

    def _detach(self) -> None:
        self._flag = None
        if self.session is not None and self.session.attached:
            self.session.detach()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the states of all workers into the checkpoint of worker 0. Lightning calls it on every worker."""
        if self.session is None or not (self.session.attached or self._last):
            return
        own = self.session.state_dict() if self.session.attached else self._last
        scaler = _scaler_of(trainer)
        state = {
            "session": own,
            "tensors": _tensors_of(pl_module),
            "optimizers": [each.state_dict() for each in trainer.strategy.optimizers],
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        states = gather_states(state, self.session.ledger)
        self._warn_of_bytes(trainer, self.session)
        if states is not None:
            checkpoint[KEY] = {"plan": repr(self.plan), "workers": [_differing(each, states[0]) for each in states]}

    def _warn_of_bytes(self, trainer: Trainer, session: Session) -> None:
        """Log once that saving sends more than training. Worker 1 does: worker 0 receives, and sends little."""
        by_phase = session.ledger.totals(by="phase")
        saving = by_phase["checkpoint"].wire_bytes if "checkpoint" in by_phase else 0
        training = session.ledger.wire_bytes - saving
        if trainer.global_rank == 1 and saving > training and not self._said_what_saving_sends:
            self._said_what_saving_sends = True
            logger.warning(
                "worker 1 has sent %s bytes to save checkpoints, and %s to train: a save sends each worker's state to "
                "worker 0. Save less often: ModelCheckpoint(every_n_epochs=...) or (every_n_train_steps=...).",
                f"{saving:,}",
                f"{training:,}",
            )

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take this worker's state out of the checkpoint."""
        saved = checkpoint.get(KEY)
        if trainer.state.fn != "fit":
            return
        if saved is None:
            logger.warning(
                "%s has no state of laconic: it was saved without this callback, or because of an error. All workers "
                "go on from worker 0's weights, and residuals start at zero.",
                trainer.ckpt_path,
            )
            return
        workers, rank = saved["workers"], trainer.global_rank
        own = dict(workers[rank]) if rank < len(workers) else {}
        if len(workers) != trainer.world_size:
            if self._resize is None:
                raise ValueError(
                    f"fit(ckpt_path={str(trainer.ckpt_path)!r}): {len(workers)} workers saved this checkpoint, and "
                    f"there are {trainer.world_size}; each has its own state. Start {len(workers)} workers, or divide "
                    'what they have not sent yet among those that are there: Laconic(..., resize="sum").'
                )
            sessions = [each["session"] for each in workers]
            own["session"] = resize_states(sessions, trainer.world_size, conserve=self._resize)[rank]
        self._restored = {**own, "given": saved["plan"]}


def check_strategy(strategy: object) -> None:
    """Refuse strategies under which workers do not hold whole copies of the model, or that average themselves."""
    name = type(strategy).__name__
    for refused in type(strategy).__mro__:
        if refused.__name__ in ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAStrategy"):
            raise ValueError(
                f"Laconic under {name}: each worker must hold a whole copy of the model, and {name} shards it, or "
                'averages it by its own means. Use Trainer(strategy="ddp"). For a model that fully_shard shards, '
                "write the loop with Fabric or torch, and call laconic.attach(plan, model, optimizer)."
            )
    if isinstance(strategy, DDPStrategy) and (strategy._ddp_comm_hook or strategy._ddp_comm_state):
        hook = getattr(strategy._ddp_comm_hook, "__name__", strategy._ddp_comm_hook)
        raise ValueError(
            f"Laconic under {name}(ddp_comm_hook={hook}): DDP takes one communication hook, and it is the plan that "
            "defines what is sent. Leave out ddp_comm_hook, ddp_comm_state and model_averaging_period; instead of "
            'powerSGD_hook, give Laconic("power_sgd(rank=4)"), and instead of post_localSGD_hook "post_local_sgd()".'
        )


class _SyncFlag(StepObserver):
    """Keeps DDP's `require_backward_grad_sync` as the session has set it, under manual optimization.

    Lightning sets it to True after each `training_step`. The session has set it for the next step by then, at the end
    of the optimizer's step.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp
        self._sync = ddp.require_backward_grad_sync

    def attached(self, session: Session) -> None:
        self.after_step(session)

    def after_step(self, session: Session) -> None:
        self._sync = self._ddp.require_backward_grad_sync

    def restore(self) -> None:
        """Set again what the session has set."""
        self._ddp.require_backward_grad_sync = self._sync


def _tensors_of(model: LightningModule) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _scaler_of(trainer: Trainer) -> torch.amp.GradScaler | None:
    return getattr(trainer.precision_plugin, "scaler", None)


def _differing(state: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's state without what Lightning saves: worker 0's weights, optimizers and loss scale."""
    if state is first:
        return {"session": state["session"]}
    tensors = {name: t for name, t in state["tensors"].items() if t is not first["tensors"].get(name)}
    return {**state, "tensors": tensors}


def _load(saved: Mapping[str, Any], trainer: Trainer, model: LightningModule, session: Session) -> None:
    """Load a worker's state. What it does not hold is worker 0's, which Lightning has loaded."""
    worker_files.set_own(_tensors_of(model), trainer.strategy.optimizers, saved)
    if saved.get("scaler") is not None and (scaler := _scaler_of(trainer)) is not None:
        scaler.load_state_dict(saved["scaler"])
    session.load_state_dict(saved["session"])
