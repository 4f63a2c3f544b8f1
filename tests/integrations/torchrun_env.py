"""Workers that a framework makes a process group of, from the environment that torchrun sets."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
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
        "OMP_NUM_THREADS": "1",
    }
    gc.freeze()  # a Trainer collects garbage when it begins: a second, with all that is imported
    warnings.simplefilter("default")  # the frameworks' own are not ours to fix
    result = job(worker, *args)
    if dist.is_initialized():
        dist.barrier()  # worker 0 has the store
    return result


def run_page(page: Path, language: str, folder: Path) -> list[dict[str, Any]]:
    """Run the one block of a documentation page in this language, in a folder; return its session's steps and bytes."""
    return run_as_torchrun(_run_block, (str(page), language, str(folder)))


def _run_block(worker: int, page: str, language: str, folder: str) -> dict[str, Any]:
    os.chdir(folder)
    [block] = re.findall(rf"^```python {language}\n(.*?)^```", Path(page).read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(block, page, "exec"), names)  # noqa: S102 - the documentation's own code
    session = names["session"] if "session" in names else names["callback"].session
    return {"step": session.step, "sent": session.ledger.wire_bytes}
