"""The options that `train` and `compare` share, each written down once."""

from pathlib import Path
from typing import Annotated

import typer

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
Seconds = Annotated[float | None, typer.Option(help="Stop each run after so many seconds.", rich_help_panel=_STOP)]
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
        help="Run this script once a plan instead of the lab's training. It attaches laconic.plan_from_env() and "
        "calls session.report(loss=...).",
        show_default=False,
    ),
]
Report = Annotated[
    Path | None, typer.Option("--report", help="Also write a page to read and to send.", rich_help_panel="Output")
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
Width = Annotated[int, typer.Option(help="Numbers, or channels, for each position.", rich_help_panel=_GPT)]
Heads = Annotated[int, typer.Option(help="Attention heads (gpt).", rich_help_panel=_GPT)]
Context = Annotated[int, typer.Option(help="Bytes that the model sees at once (gpt).", rich_help_panel=_GPT)]
Batch = Annotated[int, typer.Option(help="Sequences, or images, in a step on each worker.", rich_help_panel=_RUN)]
Lr = Annotated[float, typer.Option(help="Learning rate of AdamW, after the ramp up.", rich_help_panel=_RUN)]
Seed = Annotated[int, typer.Option(help="Decides the first weights and every batch.", rich_help_panel=_RUN)]
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
Port = Annotated[int, typer.Option(help="Where workers meet. 0: any free port.", rich_help_panel=_RUN)]
Oversubscribe = Annotated[
    bool,
    typer.Option("--oversubscribe", help="Allow more workers than the cores can serve.", rich_help_panel=_RUN),
]
