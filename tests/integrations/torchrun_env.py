"""Workers that a framework makes a process group of, from the environment that torchrun sets."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from tests.workers import PRELOADED, free_port, run_workers

PRELOADED += [name for name in ("accelerate", "transformers.trainer") if importlib.util.find_spec(name.split(".")[0])]


def run_as_torchrun(job: Callable[..., Any], args: tuple[Any, ...] = (), workers: int = 2) -> list[Any]:
    """Run `job(worker, *args)` in worker processes that have torchrun's environment, and no process group yet."""
    return run_workers(_work, workers, (job, workers, free_port(), args), group=False, timeout_s=150)


def _work(worker: int, job: Callable[..., Any], workers: int, port: int, args: tuple[Any, ...]) -> Any:
    os.environ |= {
        "RANK": str(worker),
        "LOCAL_RANK": str(worker),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    warnings.simplefilter("default")  # the frameworks' own are not ours to fix
    result = job(worker, *args)
    if dist.is_initialized():
        dist.barrier()  # worker 0 has the store
    return result
