"""The `laconic` command: its subcommands and exit codes.

A user's mistake gives one paragraph on stderr and exit code 2, a failed worker 1, a signal 128 plus its number. A
traceback is a defect of laconic. Only the subcommand that is asked for is imported: `laconic --help` needs no torch.
"""

import os
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import laconic
from laconic.errors import PlanError
from laconic.tools.errors import UsageError
from laconic.tools.launch.output import WorkerError
from laconic.tools.launch.workers import RUN_VARIABLE, Stopped, found_place, stoppable
from laconic.tools.machine import other_project

COMMANDS = {
    "compare": "Run the same training once with each plan, and compare loss, bytes and time.",
    "migrate": "List the imports to change and the known misuses in training scripts; they are read, never run.",
    "doctor": "Check this machine, or all workers under torchrun, before a run. Shows what is wrong and what to do.",
    "probe": "Measure collectives, codecs and a training step, in about a minute.",
    "plan": "Predict what each plan sends, how long a step takes, and which one reaches the same loss first.",
    "simulate": "Train with many workers in this process, or only count the time that they would take.",
}
"""The subcommands, and the first line of the help of each."""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"laconic {laconic.__version__}")
        if (other := other_project()) is not None:
            typer.echo("laconic: {}. {} {}".format(*other), err=True)
        raise typer.Exit


def _start(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train PyTorch models over networks that are too slow for them."""


def make_app(*asked: str) -> typer.Typer:
    """Make the command, with the subcommands that are asked for; of the others it has names and summaries alone."""
    app = typer.Typer(name="laconic", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_start)
    for name, summary in COMMANDS.items():
        if name in asked:
            app.command(name)(_command(name))
        else:
            app.command(name, help=summary)(lambda: None)
    return app


def _command(name: str) -> Callable[..., None]:
    """Import a subcommand."""
    if name == "compare":
        from laconic.cli.compare import compare

        return compare
    if name == "migrate":
        from laconic.cli.migrate import migrate

        return migrate
    if name == "doctor":
        from laconic.cli.doctor import doctor

        return doctor
    if name == "probe":
        from laconic.cli.probe import probe

        return probe
    if name == "plan":
        from laconic.cli.plan import plan

        return plan
    from laconic.cli.simulate import simulate

    return simulate


def main() -> None:
    """Run the subcommand that the arguments name."""
    with stoppable():
        try:
            make_app(*sys.argv[1:])()
        except Stopped as stopped:
            _end(f"stopped by {stopped}; no worker is left behind.", 128 + stopped.signal_number)
        except (UsageError, PlanError) as error:
            _end(str(error), 2)
        except WorkerError as error:
            _end(str(error), 1)


def _end(message: str, code: int) -> None:
    place = found_place(os.environ)
    if place is None or place.worker == 0 or RUN_VARIABLE in os.environ:  # each worker of ours has a log of its own
        print(f"laconic: {message}", file=sys.stderr)
    sys.exit(code)
