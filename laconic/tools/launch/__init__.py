"""Start workers on this machine, each in a process or a network namespace of its own, and say why one failed.

`workers.run_workers` runs a command on every worker to its end, or raises `output.WorkerError`; `workers.started`
is for callers that watch the workers themselves; `output.following` shows what workers write while they run.
"""
