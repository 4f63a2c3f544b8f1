"""Start workers on this machine, each in a process or a network namespace of its own, and say why one failed."""
