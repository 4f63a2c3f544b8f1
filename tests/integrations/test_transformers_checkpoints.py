"""Checkpoints of the Trainer: every worker's state is in them, and training resumes from it exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.test_transformers import (
    PLANS,
    STEPS,
    WORKERS,
    add,
    gpt,
    losses_of,
    make_trainer,
    text,
    weights_of,
)
from tests.integrations.torchrun_env import run_as_torchrun
from tests.workers import listen

pytestmark = pytest.mark.frameworks
pytest.importorskip("transformers")

RESUMED = (PLANS[1], PLANS[3], PLANS[4])
"""Those that keep residuals, anchors, and fragments in flight; post_local_sgd keeps less than any."""


def _train_and_save(worker: int, folder: str, resume: bool) -> dict[str, Any]:
    """Train, and save after every third step; or go on from the first of these checkpoints."""
    results = {}
    for index, plan in enumerate(RESUMED):
        place = Path(folder) / str(index)
        trainer = make_trainer(str(place), gpt(), text(), save_strategy="steps", save_steps=3, seed=index)
        callback = add(trainer, plan)
        trainer.train(resume_from_checkpoint=str(place / "checkpoint-3") if resume else None)
        assert callback.session.step == STEPS
        saved = {each.name for each in place.glob("checkpoint-*/laconic_*")}
        assert saved == {"laconic_0.safetensors", "laconic_1.safetensors"}
        results[plan] = losses_of(trainer), weights_of(trainer)
    return results


def test_resuming_from_a_checkpoint_is_exact(tmp_path):
    whole = run_as_torchrun(_train_and_save, (str(tmp_path), False))
    resumed = run_as_torchrun(_train_and_save, (str(tmp_path), True))
    for worker in range(WORKERS):
        for plan in RESUMED:
            (losses, weights), (again, others) = whole[worker][plan], resumed[worker][plan]
            assert losses == again, plan  # the log of the first steps is in the checkpoint, too
            assert all(map(torch.equal, weights, others)), plan


def _rotate(worker: int, folder: str) -> dict[str, Any]:
    """Keep two checkpoints and the best model, under a plan that has a fragment in flight at the end."""
    trainer = make_trainer(
        folder,
        gpt(),
        text(),
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=1,
        eval_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
        learning_rate=3.0,  # it gets worse from the first step on
        lr_scheduler_type="constant",
        max_steps=5,
    )
    callback = add(trainer, "streaming_diloco(period=4, fragments=2, delay=1)")
    said = listen()
    trainer.train()
    said, best = list(said), trainer.state.best_model_checkpoint
    from safetensors.torch import load_file

    saved = load_file(Path(best) / "model.safetensors")
    state = trainer.model.state_dict()
    files = {each.name: sorted(p.name for p in each.glob("laconic_*")) for each in Path(folder).glob("checkpoint-*")}
    resumed = make_trainer(folder, gpt(), text(), max_steps=6, save_strategy="no")
    again = add(resumed, "streaming_diloco(period=4, fragments=2, delay=1)")
    resumed.train(resume_from_checkpoint=True)
    return {
        "equal": all(torch.equal(state[name], t) for name, t in saved.items()),
        "best": Path(best).name,
        "files": files,
        "step": (callback.session.step, again.session.step),
        "said": said,
    }


def test_rotated_checkpoints_and_the_best_model(tmp_path):
    for worker, result in enumerate(run_as_torchrun(_rotate, (str(tmp_path),))):
        assert result["equal"], "the fragment in flight does not change the model that was loaded at the end"
        both = ["laconic_0.safetensors", "laconic_1.safetensors"]
        assert result["files"] == {result["best"]: both, "checkpoint-5": both}
        assert result["step"] == (5, 6)
        lines = [line for line in result["said"] if "The Trainer sends" in line]
        assert len(lines) == (1 if worker == 0 else 0)
        assert worker or all(what in lines[0] for what in ("average_tokens_across_devices=False", "evaluation", "loss"))


def _go_on_without(worker: int, folder: str, workers: int) -> list[str]:
    errors = []
    if workers == WORKERS:
        trainer = make_trainer(f"{folder}/without", gpt(), text(), save_strategy="steps", save_steps=3, max_steps=3)
        trainer.train()
        trainer = make_trainer(f"{folder}/with", gpt(), text(), save_strategy="steps", save_steps=3, max_steps=3)
        add(trainer, "ddp()")
        trainer.train()
    for name, plan in (("without", "ddp()"), ("with", "power_sgd()"), ("with", "ddp()")):
        trainer = make_trainer(f"{folder}/{name}", gpt(), text())
        callback = add(trainer, plan)
        try:
            trainer.train(resume_from_checkpoint=True)
            errors.append("")
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
        assert not callback.session.attached
    trainer = make_trainer(f"{folder}/without", gpt(), text())
    callback = add(trainer, "ddp()", resume=False)
    trainer.train(resume_from_checkpoint=True)
    assert callback.session.step == STEPS - 3
    trainer = make_trainer(f"{folder}/with", gpt(), text())
    callback = add(trainer, "ddp()", resize="sum")
    trainer.train(resume_from_checkpoint=True)
    assert callback.session.step == STEPS, "the steps of the workers that saved count, too"
    return errors


def test_checkpoints_that_do_not_fit_are_refused(tmp_path):
    for worker, errors in enumerate(run_as_torchrun(_go_on_without, (str(tmp_path), WORKERS))):
        way_out = "with residuals of zero, use LaconicCallback(..., resume=False)."
        assert f"checkpoint-3 has no laconic_{worker}.safetensors" in errors[0] and errors[0].endswith(way_out)
        assert "saved under ddp() and the plan is power_sgd" in errors[1]
        assert errors[2] == ""
    (errors,) = run_as_torchrun(_go_on_without, (str(tmp_path), 1), workers=1)
    assert "was saved by 2 workers, and there are 1" in errors[2] and errors[2].endswith(way_out)
    assert "Start 2 workers, or divide" in errors[2] and 'LaconicCallback(..., resize="sum")' in errors[2]
