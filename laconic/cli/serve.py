"""`laconic serve`: host the store of elastic runs, and start it again when it does not answer."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import TimeoutError as NoAnswer
from datetime import timedelta
from typing import Annotated

import typer

from laconic import elastic
from laconic.comm.timeout import run_in_thread
from laconic.tools.errors import UsageError
from laconic.torch_private.elastic import TCPStore

DEFAULT_PORT = 29400
ALL_INTERFACES = "0.0.0.0"
CHECK_EVERY_S, ANSWER_S, MOST_FAILURES = 5.0, 10.0, 3
KEY = "laconic/serve"


def serve(
    port: Annotated[int, typer.Option(help="Port to listen on. 0: any free port.")] = DEFAULT_PORT,
    host: Annotated[str, typer.Option(help="Address to listen on. Default: all interfaces.")] = ALL_INTERFACES,
) -> None:
    """Host the store of elastic runs until stopped. It can also be the --rdzv-endpoint of torchrun's agents."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: a port is between 1 and 65535, or 0 for any free port.")
    try:
        store = elastic.serve(port, host)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"--host {host} --port {port}: the store cannot listen there ({reason}). Choose another port, or an "
            "address of this machine."
        ) from None
    _discard_logs_of_torch()
    where = "all addresses" if host == ALL_INTERFACES else host
    typer.echo(
        f"the store of elastic runs listens on port {store.port} of this machine, on {where}, until it is stopped"
    )
    while_answering(lambda: answers(host, store.port))
    typer.echo(
        f"the store has not answered {MOST_FAILURES} times: it starts again on port {store.port}, empty. Runs that "
        "used it stop with StoreLostError; started again, they continue from their folders."
    )
    sys.stdout.flush()
    # This process ends with all that hangs in it. A hung store cannot be closed from inside.
    os.execv(sys.executable, [sys.executable, "-m", "laconic", "serve", "--host", host, "--port", str(store.port)])


def _discard_logs_of_torch() -> None:
    """Keep Python's stderr, and discard what torch's C++ writes there: a page for each malformed message.

    The store's only thread writes it. If nobody reads a pipe on stderr, it is full after some dozens of such messages,
    and the store would wait for ever.
    """
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)


def while_answering(check: Callable[[], bool], sleep: Callable[[float], None] = time.sleep) -> None:
    """Return when the check has failed several times in a row."""
    failures = 0
    while failures < MOST_FAILURES:
        sleep(CHECK_EVERY_S)
        failures = 0 if check() else failures + 1


def answers(host: str, port: int) -> bool:
    """Whether a new client can connect to the store, write a key and read it."""

    def ask() -> bytes:
        client = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=ANSWER_S))
        client.set(KEY, "here")
        return client.get(KEY)

    try:
        return bool(run_in_thread(ask).result(ANSWER_S) == b"here")
    except (NoAnswer, RuntimeError):
        return False
