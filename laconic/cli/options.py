"""The options of `train` and `compare`, each defined once."""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from laconic.compare.settings import Settings

DEFAULT = Settings(plan="ddp()")

_GPT = "The model"
_RUN = "The run"
_LINK = "The link"
_STOP = "When to stop"

Workers = Annotated[
    int | None,
    typer.Option(help="Worker processes. Default: 4, or as many as torchrun has started.", rich_help_panel=_RUN),
]
StepsAtMost = Annotated[
    int | None,
    typer.Option(
        help="Steps of the optimizer, at most; the learning rate follows them. Default: 192, or the script's own end.",
        rich_help_panel=_STOP,
    ),
]
Seconds = Annotated[float | None, typer.Option(help="Stop each run after this many seconds.", rich_help_panel=_STOP)]
UntilLoss = Annotated[
    float | None,
    typer.Option(
        help="Stop each run at this loss: the training loss, averaged over 8 steps and all workers.",
        rich_help_panel=_STOP,
    ),
]
LinkText = Annotated[
    str | None,
    typer.Option(
        "--link",
        help="Put each worker on a host of its own behind a link of this rate, such as 100mbit, or of several "
        'levels, innermost first, such as "2 @ 1gbit, 2 @ 50mbit".',
        show_default=False,
        rich_help_panel=_LINK,
    ),
]
HostCount = Annotated[
    int | None, typer.Option("--hosts", help="Hosts on the link, with one worker each.", rich_help_panel=_LINK)
]
Computed = Annotated[
    bool,
    typer.Option("--computed", help="Compute the link's time instead of making the link.", rich_help_panel=_LINK),
]
ScriptPath = Annotated[
    Path | None,
    typer.Option(
        "--script",
        help="Run this script once per plan instead of the lab's training. It attaches laconic.plan_from_env() and "
        "calls session.report(loss=...).",
        show_default=False,
    ),
]
Report = Annotated[
    Path | None, typer.Option("--report", help="Also write a report to this HTML file.", rich_help_panel="Output")
]
Png = Annotated[
    Path | None, typer.Option("--png", help="Also write the figures to this file.", rich_help_panel="Output")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Run every plan, also those finished before.", rich_help_panel="Output")
]
Steps = Annotated[int, typer.Option(help="Steps of the optimizer.", rich_help_panel=_RUN)]
Model = Annotated[str, typer.Option(help="gpt, on text; or resnet, on digits.", rich_help_panel=_GPT)]
Layers = Annotated[int, typer.Option(help="Blocks of the model.", rich_help_panel=_GPT)]
Width = Annotated[int, typer.Option(help="Width of the embedding, or channels.", rich_help_panel=_GPT)]
Heads = Annotated[int, typer.Option(help="Attention heads (gpt).", rich_help_panel=_GPT)]
Context = Annotated[int, typer.Option(help="Length of a sequence, in bytes (gpt).", rich_help_panel=_GPT)]
Batch = Annotated[int, typer.Option(help="Sequences, or images, per step and worker.", rich_help_panel=_RUN)]
Lr = Annotated[float, typer.Option(help="Learning rate of AdamW, after the warm-up.", rich_help_panel=_RUN)]
Seed = Annotated[int, typer.Option(help="Seed of the initial weights and of the batches.", rich_help_panel=_RUN)]
Data = Annotated[
    Path | None,
    typer.Option(
        help="A text file, or a folder of them. Default: the source of Python's standard library.",
        rich_help_panel=_RUN,
    ),
]
BucketMb = Annotated[float, typer.Option(help="Size of DDP's gradient buckets.", rich_help_panel=_RUN)]
Json = Annotated[
    Path | None, typer.Option("--json", help="Also write the results to this file.", rich_help_panel="Output")
]
Plain = Annotated[bool, typer.Option("--plain", help="Log lines even if this is a terminal.", rich_help_panel="Output")]
Port = Annotated[int, typer.Option(help="Port of the launcher. 0: any free port.", rich_help_panel=_RUN)]
Oversubscribe = Annotated[
    bool,
    typer.Option("--oversubscribe", help="Allow more workers than the cores can serve.", rich_help_panel=_RUN),
]


def lab_settings(command: typer.Context, **changes: Any) -> Settings:
    """Make the settings of the lab from the options of a command, with changes."""
    names = {field.name for field in fields(Settings)}
    return Settings(**{name: value for name, value in command.params.items() if name in names} | changes)
