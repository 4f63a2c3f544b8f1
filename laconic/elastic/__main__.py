"""`python -m laconic.elastic`: host the store of elastic runs until stopped.

    python -m laconic.elastic --port 29400 --host 10.0.0.5

It can also be the --rdzv-endpoint of torchrun's agents.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from laconic.elastic import serve

DEFAULT_PORT = 29400
ALL_INTERFACES = "0.0.0.0"


def main() -> None:
    """Host a store, and name its port on stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m laconic.elastic",
        description="Host the store of elastic runs until stopped. It has no authentication: keep it in your network.",
    )
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="port to listen on; 0: any free port")
    parser.add_argument("--host", default=ALL_INTERFACES, help="address to listen on; default: all interfaces")
    options = parser.parse_args()
    try:
        store = serve(options.port, options.host)
    except (OSError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        parser.error(
            f"--host {options.host} --port {options.port}: the store cannot listen there ({reason}). Choose another "
            "port from 1 to 65535, or 0 for any free one, and an address of this machine."
        )
    # torch's C++ writes a page to stderr for each malformed message, in the store's only thread. If nobody reads a pipe
    # on stderr, it is full after some dozens of them, and the store would wait for ever.
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    where = "all addresses" if options.host == ALL_INTERFACES else options.host
    sys.stdout.write(
        f"the store of elastic runs listens on port {store.port} of this machine, on {where}, until it is stopped\n"
    )
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
