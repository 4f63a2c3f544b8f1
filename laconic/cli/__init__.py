"""The `laconic` command: `main.py`, one file for each subcommand, and the display."""

import laconic
from laconic.tools.machine import other_project

# The other project called laconic, if it was installed later, over this one, has no names of this one.
if not hasattr(laconic, "__getattr__") and (_other := other_project()) is not None:
    raise ImportError("laconic: {}. {} {}".format(*_other))
