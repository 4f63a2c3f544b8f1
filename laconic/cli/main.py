"""The `laconic` command: its subcommands and exit codes.

A user's mistake gives one paragraph on stderr and exit code 2, a failed worker 1, a signal 128 plus its number. A
traceback is a defect of laconic.
"""

import os
import sys
from typing import Annotated

import typer

import laconic
from laconic.cli.compare import compare
from laconic.cli.doctor import doctor
from laconic.cli.migrate import migrate
from laconic.cli.plan import plan
from laconic.cli.probe import probe
from laconic.cli.simulate import simulate
from laconic.tools.distribution import other_project
from laconic.tools.errors import UsageError
from laconic.tools.launch.failures import WorkerError
from laconic.tools.launch.workers import Stopped, found_place, stoppable

app = typer.Typer(
    name="laconic",
    help="Train PyTorch models over networks that are too slow for them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"laconic {laconic.__version__}")
        if (other := other_project()) is not None:
            typer.echo("laconic: {}. {} {}".format(*other), err=True)
        raise typer.Exit


@app.callback()
def laconic_command(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Train PyTorch models over networks that are too slow for them."""


app.command()(compare)
app.command()(migrate)
app.command()(doctor)
app.command()(probe)
app.command()(plan)
app.command()(simulate)


def main() -> None:
    """Run the subcommand that the arguments name."""
    with stoppable():
        try:
            app()
        except Stopped as stopped:
            _end(f"stopped by {stopped}; no worker is left behind.", 128 + stopped.signal_number)
        except (UsageError, laconic.PlanError) as error:
            _end(str(error), 2)
        except WorkerError as error:
            _end(str(error), 1)


def _end(message: str, code: int) -> None:
    place = found_place(os.environ)
    if place is None or place.worker == 0:
        print(f"laconic: {message}", file=sys.stderr)
    sys.exit(code)
