"""`laconic serve`: host the store of elastic runs."""

import signal
from typing import Annotated

import typer

from laconic import elastic
from laconic.compare.settings import LabError

DEFAULT_PORT = 29400


def serve(
    port: Annotated[int, typer.Option(help="Port to listen on, on all interfaces. 0: any free port.")] = DEFAULT_PORT,
) -> None:
    """Host the store of elastic runs until stopped. It can also be the --rdzv-endpoint of torchrun's agents."""
    if not 0 <= port <= 65535:
        raise LabError(f"--port {port}: a port is between 1 and 65535, or 0 for any free port.")
    try:
        store = elastic.serve(port)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise LabError(f"--port {port}: the store cannot listen there ({reason}). Choose another port.") from None
    typer.echo(f"the store of elastic runs listens on port {store.port} of this machine, until it is stopped")
    while True:
        signal.pause()
