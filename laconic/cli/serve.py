"""`laconic serve`: hosts the store through which the workers of an elastic run find each other."""

import signal
from typing import Annotated

import typer

from laconic import elastic
from laconic.compare.settings import LabError

DEFAULT_PORT = 29400


def serve(
    port: Annotated[int, typer.Option(help="Where to listen, on all interfaces. 0: any free port.")] = DEFAULT_PORT,
) -> None:
    """Host the store of elastic runs until stopped. It can be the --rdzv-endpoint of torchrun's agents, too."""
    if not 0 <= port <= 65535:
        raise LabError(f"--port {port}: a port is between 1 and 65535, or 0 for any that is free.")
    try:
        store = elastic.serve(port)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LabError(f"--port {port}: no store can listen there ({reason}). Choose another.") from None
    typer.echo(f"elastic runs meet at port {store.port} of this machine, until this is stopped")
    while True:
        signal.pause()
