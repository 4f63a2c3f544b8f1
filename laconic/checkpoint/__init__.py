"""Save, verify, load and resize. No pickle, nothing half-written, no flipped bit that goes unnoticed.

    from laconic import checkpoint

    checkpoint.save("checkpoints", {"talk": talk.state_dict(), "model": model.state_dict()}, step=talk.step)

    if checkpoint.generations("checkpoints"):
        saved = checkpoint.load("checkpoints")
        talk.load_state_dict(saved.state["talk"])

Each worker saves a nest of its own: tensors to a safetensors file, the rest to JSON. A generation is a folder with the
files of all workers and a manifest of their digests. It appears whole, when all have written; the last few are kept.
"""

from laconic.checkpoint.generation import CheckpointError, Generation, Loaded
from laconic.checkpoint.loading import generations, load, newest_common, rewind, verify
from laconic.checkpoint.resizing import resize
from laconic.checkpoint.saving import Saving, save

__all__ = [
    "CheckpointError",
    "Generation",
    "Loaded",
    "Saving",
    "generations",
    "load",
    "newest_common",
    "resize",
    "rewind",
    "save",
    "verify",
]
