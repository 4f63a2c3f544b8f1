"""Run laconic under the Trainer of Hugging Face transformers.

    trainer = Trainer(model, args, train_dataset=data)
    trainer.add_callback(LaconicCallback("diloco(period=16)", trainer))
    trainer.train()

Every worker's state is saved in the Trainer's checkpoints, and `trainer.train(resume_from_checkpoint=...)` goes on from
it, bit for bit.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from accelerate.data_loader import DataLoaderDispatcher
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

import laconic
from laconic import Never, Plan, Session
from laconic.integrations import worker_files

logger = logging.getLogger(__name__)


class LaconicCallback(TrainerCallback):  # type: ignore[misc]
    """Attaches a plan when training begins, and detaches it at the end.

    Args:
        plan: The plan, or its text; by default that of the environment variable LACONIC_PLAN, else `ddp()`.
        trainer: The trainer that gets this callback.
        resume: Whether each worker's state is loaded when training resumes from a checkpoint. With False it starts
            anew, from the model and the optimizer in the checkpoint: residuals of zero, steps that count from 1.
        resize: Resume from a checkpoint of another number of workers: their residuals are divided among those that are
            there, and keep their "sum" or their "mean", as in `laconic.checkpoint.resize`. None refuses.
        attach: What attaches the plan, for options: `functools.partial(laconic.attach, clip_norm=1.0)`.
    """

    session: Session | None = None
    """The session of the training that runs, or of the last one; its ledger stays readable."""

    def __init__(
        self,
        plan: Plan | str | None,
        trainer: Trainer,
        *,
        resume: bool = True,
        resize: worker_files.Resize | None = None,
        attach: Callable[..., Session] = laconic.attach,
    ) -> None:
        _check(trainer)
        worker_files.check_resize("LaconicCallback", resize)
        self.plan = laconic.plan_from_env() if plan is None else laconic.plan(plan) if isinstance(plan, str) else plan
        self._trainer = trainer
        self._resume, self._resize = resume, resize
        self._attach = attach
        self._checkpoint: str | None = None
        self._loss: float | None = None
        trainer.train = self._noting_checkpoint(trainer.train)

    def _noting_checkpoint(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Note which checkpoint training resumes from: the Trainer does not tell its callbacks."""

        @functools.wraps(train)
        def noting(resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
            if resume_from_checkpoint is True:
                resume_from_checkpoint = get_last_checkpoint(self._trainer.args.output_dir) or True
            self._checkpoint = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
            return train(resume_from_checkpoint, *args, **options)

        return noting

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Attach to the DDP model, which is `trainer.model_wrapped`, and load this worker's state."""
        self._detach()  # after a training that has raised, or with another batch size (auto_find_batch_size)
        trainer = self._trainer
        self.session = session = self._attach(self.plan, trainer.model_wrapped, trainer.optimizer)
        try:
            worker_files.check_can_save(session)
            if self._checkpoint is not None and self._resume:
                saved = worker_files.load(
                    self._checkpoint,
                    session,
                    "use LaconicCallback(..., resume=False)",
                    resize=self._resize,
                    resizing='LaconicCallback(..., resize="sum")',
                )
                worker_files.restore_own(session, saved)
        except BaseException:
            session.detach()
            raise
        traffic = other_traffic(trainer, given.get("train_dataloader")) if session.plan.local else []
        if traffic and state.is_world_process_zero and session.workers > 1:
            logger.warning("%s sends nothing in local steps. The Trainer sends %s.", self.plan, "; ".join(traffic))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Write this worker's state into the checkpoint. On return all workers have written theirs."""
        if self.session is not None and not args.save_only_model:
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            worker_files.save(folder, self.session)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """Pass the losses that the Trainer logs to the session's observers, and stop if one of them says so."""
        logs = logs or {}
        self._loss = logs.get("loss", self._loss)
        if self.session is None or self._loss is None or not logs.keys() & {"loss", "eval_loss"}:
            return
        if self.session.report(loss=self._loss, validation=logs.get("eval_loss")):
            control.should_training_stop = True

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Average the weights of all workers, where local steps have made them different, and detach."""
        loaded_best = args.load_best_model_at_end and state.best_model_checkpoint is not None
        if self.session is not None and not loaded_best and not isinstance(self.plan.schedule, Never):
            self.session.average_weights()
        self._detach()

    def _detach(self) -> None:
        if self.session is not None and self.session.attached:
            self.session.detach()


def _check(trainer: Trainer) -> None:
    """Refuse what averages gradients in ways that laconic cannot take over."""
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "LaconicCallback(plan, trainer): the Trainer uses DeepSpeed, which averages gradients itself. Leave out "
            "TrainingArguments(deepspeed=...): laconic works with DDP, and with FSDP2 for models that need shards."
        )
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.fsdp_version == 1:
        raise ValueError(
            "LaconicCallback(plan, trainer): the Trainer uses FSDP1, whose flat parameters cannot be averaged one by "
            'one. Use FSDP2: TrainingArguments(fsdp=True, fsdp_config={"version": 2}).'
        )


def other_traffic(trainer: Trainer, loader: object) -> list[str]:
    """Say what the Trainer itself sends, and how to stop it."""
    args, lines = trainer.args, []
    if isinstance(loader, DataLoaderDispatcher):
        lines.append("every batch, from worker 0 (stop it with accelerator_config={'dispatch_batches': False})")
    if args.average_tokens_across_devices and (trainer.model_accepts_loss_kwargs or trainer.compute_loss_func):
        lines.append("a count of tokens in every step (stop it with average_tokens_across_devices=False)")
    if args.include_num_input_tokens_seen != "no":
        lines.append("a count of input tokens in every step (stop it with include_num_input_tokens_seen='no')")
    if args.logging_strategy != "no":
        lines.append(f"the loss whenever it is logged (logging_strategy={str(args.logging_strategy.value)!r})")
    if args.eval_strategy != "no":
        lines.append("losses and predictions in every evaluation, which runs on each worker's own weights")
    return lines
