"""How exchanges run: over a process group, in lockstep in one process, or dry, where bytes are only counted."""
