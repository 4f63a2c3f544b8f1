"""Save, verify, load and resize checkpoints: atomic, with digests, and without pickle.

    checkpoint.save("checkpoints", {"session": session.state_dict(), "model": model.state_dict()}, step=session.step)
    session.load_state_dict(checkpoint.load("checkpoints").state["session"])

Each worker saves its own state in a safetensors file. A checkpoint is a folder with the files of all workers and a
manifest of their digests. It appears when all workers have written, and the last few are kept.
"""

from laconic.checkpoint.loading import Checkpoint, Loaded, checkpoints, load, newest_common, rewind, verify
from laconic.checkpoint.resizing import resize
from laconic.checkpoint.saving import Saving, save
from laconic.errors import CheckpointError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Loaded",
    "Saving",
    "checkpoints",
    "load",
    "newest_common",
    "resize",
    "rewind",
    "save",
    "verify",
]
