"""Run laconic under Hugging Face Accelerate.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    session = laconic.attach(laconic.power_sgd(), model, optimizer)     # what `prepare` has returned
    checkpoint(accelerator, session)                                    # save_state and load_state keep it, too

`accelerator.backward`, `accumulate`, `no_sync`, `clip_grad_norm_` and schedulers are used as before.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from typing import Any

from accelerate import Accelerator
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from laconic import Session, StepObserver
from laconic.integrations import worker_files

SAVING_S = 3600.0
"""How long the other workers wait for the first one, which writes the model after they have gone on."""
_WITHOUT = "call accelerator.load_state before checkpoint(accelerator, session)"
_names: weakref.WeakKeyDictionary[Accelerator, set[str]] = weakref.WeakKeyDictionary()


def checkpoint(
    accelerator: Accelerator, session: Session, name: str = "laconic", *, resize: worker_files.Resize | None = None
) -> None:
    """Keep each worker's state of a session in the checkpoints of `accelerator.save_state` and `load_state`.

    Every worker writes `<name>_<rank>.safetensors` into the folder. Two sessions of one accelerator need two names.
    It ends with `session.detach()`. `resize` loads what another number of workers has saved: their residuals keep their
    "sum" or their "mean", as in `laconic.checkpoint.resize`.
    """
    worker_files.check_resize("checkpoint", resize)
    if name in _names.get(accelerator, ()):
        raise ValueError(
            f"checkpoint(accelerator, session, name={name!r}): another session writes these files. Detach it, or give "
            "each session a name of its own."
        )
    worker_files.check_can_save(session)
    session.observe(Checkpoints(accelerator, name, resize))


class Checkpoints(StepObserver):
    """Saves and loads one session's state with an accelerator's, as long as the session is attached."""

    def __init__(self, accelerator: Accelerator, name: str, resize: worker_files.Resize | None = None) -> None:
        self._accelerator = accelerator
        self._name, self._resize = name, resize
        self._handles: list[RemovableHandle] = []
        self._saving = ExitStack()

    def attached(self, session: Session) -> None:
        """Install the hooks."""

        def save(models: list[Any], weights: list[Any], folder: str) -> None:
            worker_files.save(folder, session, self._name)
            if self._accelerator.is_main_process:  # which writes the model now: the others reach their next exchange
                self._saving.close()
                self._saving.enter_context(session.away(SAVING_S))

        def load(models: list[Any], folder: str) -> None:
            found = worker_files.load(
                folder, session, _WITHOUT, self._name, resize=self._resize, resizing='checkpoint(..., resize="sum")'
            )
            _restore_after_optimizers(session, found)

        _names.setdefault(self._accelerator, set()).add(self._name)
        self._handles = [
            self._accelerator.register_save_state_pre_hook(save),
            self._accelerator.register_load_state_pre_hook(load),
        ]

    def before_step(self, session: Session) -> None:
        """Note that this worker is back from saving."""
        self._saving.close()

    def detached(self, session: Session) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        _names[self._accelerator].discard(self._name)


def _restore_after_optimizers(session: Session, state: dict[str, Any]) -> None:
    """Set this worker's own weights and moments after Accelerate has loaded worker 0's: models, then optimizers."""
    if "own" not in state:
        return
    waiting: dict[Optimizer, RemovableHandle] = {}

    def loaded(optimizer: Optimizer) -> None:
        waiting.pop(optimizer).remove()
        if not waiting:
            worker_files.restore_own(session, state)

    for optimizer in session.optimizers:
        waiting[optimizer] = optimizer.register_load_state_dict_post_hook(loaded)
