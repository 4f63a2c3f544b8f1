"""The options that commands share, each defined once."""

import os
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.tools.errors import UsageError
from laconic.tools.lab.tasks import STEPS, Lab
from laconic.tools.launch.links import Link
from laconic.tools.launch.links import link as parse_link
from laconic.tools.launch.workers import found_place, workers_here

DEFAULT = Lab()

_option = partial(typer.Option, show_default=False)
_model = partial(typer.Option, rich_help_panel="The model")
_run = partial(typer.Option, rich_help_panel="The run")
_link = partial(typer.Option, show_default=False, rich_help_panel="The link")
_stop = partial(typer.Option, rich_help_panel="When to stop")
_output = partial(typer.Option, rich_help_panel="Output")

Workers = Annotated[int | None, _run(help="Worker processes. Default: 4, or as many as torchrun has started.")]
Steps = Annotated[int, _run(help="Steps of the optimizer.")]
Batch = Annotated[int, _run(help="Sequences, or images, per step and worker.")]
Lr = Annotated[float, _run(help="Learning rate of AdamW, after the warm-up.")]
Seed = Annotated[int, _run(help="Seed of the initial weights and of the batches.")]
_TEXT = "A text file, or a folder of them. Default: the source of Python's standard library."
Data = Annotated[Path | None, _run(help=_TEXT)]
_GUARD = "What watches each plan: warn measures what it delivers and logs, act also makes a weak plan stronger."
GuardMode = Annotated[str, _run("--guard", help=_GUARD)]

Model = Annotated[str, _model(help="gpt, on text; or resnet, on digits.")]
Layers = Annotated[int, _model(help="Blocks of the model.")]
Width = Annotated[int, _model(help="Width of the embedding, or channels.")]
Context = Annotated[int, _model(help="Length of a sequence, in bytes (gpt).")]

_STEPS = f"Steps of the optimizer, at most; the learning rate follows them. Default: {STEPS}, or the script's own end."
StepsAtMost = Annotated[int | None, _stop(help=_STEPS)]
Seconds = Annotated[float | None, _stop(help="Stop each run after this many seconds.")]
_LOSS = (
    "Stop each run at this validation loss of the averaged weights. For a script that reports none: at this training "
    "loss, averaged over 8 steps and all workers."
)
UntilLoss = Annotated[float | None, _stop(help=_LOSS)]
_EVERY = "Steps from one validation to the next. Its time does not count."
ValidateEvery = Annotated[int, _stop(help=_EVERY)]

_RATE = (
    "Put each worker on a host of its own behind a link of this rate, such as 100mbit, or of several levels, innermost "
    'first, such as "2 @ 1gbit, 2 @ 50mbit".'
)
_BASELINES = "Also run ddp() and alone(), and, with a link and a target loss, ddp() without the link."
Baselines = Annotated[bool, typer.Option("--baselines/--no-baselines", help=_BASELINES)]
LinkText = Annotated[str | None, _link("--link", help=_RATE)]
HostCount = Annotated[int | None, _link("--hosts", help="Hosts on the link, with one worker each.")]
Computed = Annotated[bool, _link("--computed", help="Compute the link's time instead of making the link.")]

_SCRIPT = (
    "Run this script once per plan instead of the lab's training. It attaches laconic.plan_from_env() and calls "
    "session.report(loss=...)."
)
ScriptPath = Annotated[Path | None, _option("--script", help=_SCRIPT)]
Json = Annotated[Path | None, _output("--json", help="Also write the results to this file.")]
Report = Annotated[Path | None, _output("--report", help="Also write a report to this HTML file.")]
_RESUME = "Do not run again what the file of --json has the results of."
Resume = Annotated[bool, _output("--resume", help=_RESUME)]
Plain = Annotated[bool, _output("--plain", help="Log lines even if this is a terminal.")]


def lab_settings(command: typer.Context, **changes: Any) -> Lab:
    """Make the settings of the lab from the options of a command, with changes."""
    names = {field.name for field in fields(Lab)}
    return Lab(**{name: value for name, value in command.params.items() if name in names} | changes)


def script_arguments(given: Sequence[str] | None, script: Path | None) -> tuple[str, ...]:
    """The arguments after "--", which are for a script."""
    if given and script is None:
        raise UsageError(f"-- {' '.join(given)}: these are for a script. Give one with --script train.py.")
    return tuple(given or ())


def refuse_under_torchrun(option: str, or_else: str = "") -> None:
    """Refuse what starts workers in a process that torchrun has started."""
    if found_place(os.environ) is not None:
        raise UsageError(
            f"{option}: torchrun has already started the workers, and this starts them itself. "
            f"Run laconic without torchrun{or_else}."
        )


def link_of(text: str | None, workers: int | None) -> Link | None:
    """Parse a link of so many workers; None if there is none."""
    if text is None:
        return None
    return parse_link(text, workers_here(workers) if "@" not in text else workers)
