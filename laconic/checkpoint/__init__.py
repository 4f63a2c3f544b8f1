"""Save, verify, load and resize checkpoints: atomic, with digests, and without pickle.

    from laconic import checkpoint

    checkpoint.save("checkpoints", {"session": session.state_dict(), "model": model.state_dict()}, step=session.step)

    if checkpoint.checkpoints("checkpoints"):
        saved = checkpoint.load("checkpoints")
        session.load_state_dict(saved.state["session"])

Each worker saves its own state in a safetensors file. A checkpoint is a folder with the files of all workers and a
manifest of their digests. It appears when all workers have written, and the last few are kept.
"""

from laconic.checkpoint.loading import checkpoints, load, newest_common, rewind, verify
from laconic.checkpoint.records import Checkpoint, CheckpointError, Loaded
from laconic.checkpoint.resizing import resize
from laconic.checkpoint.saving import Saving, save

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
