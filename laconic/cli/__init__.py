"""The `laconic` command: `main.py`, one file for each subcommand, and the display."""

import laconic
from laconic.tools.distribution import other_project

if not hasattr(laconic, "attach") and (_other := other_project()) is not None:  # it was installed later, over this one
    raise ImportError("laconic: {}. {} {}".format(*_other))
