"""Fault injection: a step observer that makes this worker fail, to test a training before it happens.

    LACONIC_OBSERVERS=laconic.tools.doctor.injection:from_env
    LACONIC_INJECT=kill:2@300,stop:1@100:5s,nan:0@50,flip:3@70,slow:1@20:2s

docs/doctor.md describes the faults. Each is injected once: not again after a second `attach` in the same process, nor
after the launcher has restarted the workers. With LACONIC_UNTIL=attach the script ends at the end of `laconic.attach`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from laconic.session.live_model import local_of
from laconic.session.observers import StepObserver

if TYPE_CHECKING:
    from laconic import Session

FACTORY = "laconic.tools.doctor.injection:from_env"
INJECT, UNTIL, MARKS = "LACONIC_INJECT", "LACONIC_UNTIL", "LACONIC_MARKS"
"""LACONIC_MARKS is a folder in which each worker records what it does: a killed worker cannot report it later."""
EXIT_DELAY_S = 0.5  # a worker that exits at once could break the last collective of a slower one

KINDS = ("kill", "stop", "nan", "flip", "slow")
EXAMPLE = "kill:2@300, stop:1@100:5s, nan:0@50, flip:3@70 or slow:1@20:2s"
_FAULT = re.compile(rf"({'|'.join(KINDS)}):(\d+)@(\d+)(?::(\d+(?:\.\d+)?)s)?")

logger = logging.getLogger(__name__)
_injected: set[Fault] = set()


@dataclass(frozen=True)
class Fault:
    """A fault of one worker in one step of the optimizer, counted from 1."""

    kind: str
    worker: int
    step: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"{self}: steps count from 1. Write {self.kind}:{self.worker}@1.")
        if self.kind == "slow" and self.seconds is None:
            raise ValueError(f"{self}: slow needs a duration. Write {self}:2s.")
        if self.kind not in ("slow", "stop") and self.seconds is not None:
            plain = f"{self.kind}:{self.worker}@{self.step}"
            raise ValueError(f"{self}: only stop and slow take a duration. Write {plain}.")

    @property
    def ends_worker(self) -> bool:
        """Whether the worker is killed, or stopped for good."""
        return self.kind == "kill" or (self.kind == "stop" and self.seconds is None)

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f":{self.seconds:g}s"
        return f"{self.kind}:{self.worker}@{self.step}{duration}"


def fault(text: str) -> Fault:
    """Parse one fault."""
    match = _FAULT.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text.strip()!r} is not a fault: write kind:worker@step, with kind {', '.join(KINDS[:-1])} or "
            f"{KINDS[-1]}, and a duration such as :5s after stop and slow. For example {EXAMPLE}."
        )
    kind, worker, step, seconds = match.groups()
    return Fault(kind, int(worker), int(step), None if seconds is None else float(seconds))


def faults(text: str) -> tuple[Fault, ...]:
    """Parse faults separated by commas."""
    return tuple(fault(part) for part in text.split(",") if part.strip())


def from_env() -> StepObserver | None:
    """Make the observer that LACONIC_UNTIL or LACONIC_INJECT asks for; None without them."""
    if os.environ.get(UNTIL) == "attach":
        return AttachOnly()
    text = os.environ.get(INJECT)
    if not text or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    return FaultInjector(faults(text))


class FaultInjector(StepObserver):
    """Injects the faults of this worker."""

    def __init__(self, wanted: Sequence[Fault]) -> None:
        self._wanted = wanted
        self._pending: list[Fault] = []
        self._first_step = 0
        self._handles: list[RemovableHandle] = []

    def attached(self, session: Session) -> None:
        """Select the faults of this worker; gradients become NaN in hooks, before DDP averages them in backward."""
        remaining = [each for each in self._wanted if each not in _injected]
        absent = [str(each) for each in remaining if each.worker >= session.workers]
        if absent:  # not an error: the group may have lost workers
            logger.warning("%s: %s ignored, there are %d workers.", INJECT, ", ".join(absent), session.workers)
        worker = 0 if session.group is None else session.group.rank()
        self._pending = [each for each in remaining if each.worker == worker]
        self._first_step = min((each.step for each in remaining), default=0)
        if any(each.kind == "nan" for each in self._pending):
            hook, trained = partial(self._nan_in_backward, session), session.parameters.values()
            self._handles = [p.register_hook(hook) for p in trained if p.requires_grad]

    def before_step(self, session: Session) -> None:
        """Inject the faults of the step that begins. Before the first fault of any worker, record the timeout."""
        if session.step + 1 == self._first_step:
            _write_mark(timeout_s=session.timeout_s)
        for due in [each for each in self._pending if each.step == session.step + 1]:
            self._take(due)
            if due.kind == "slow":
                time.sleep(due.seconds or 0.0)
            elif due.kind == "flip":
                flip_a_bit(session.parameters)
            elif due.kind == "nan":  # no hook ran: sharded gradients do not come from autograd
                for grad in [p.grad for p in session.parameters.values() if p.grad is not None][:1]:
                    grad.mul_(torch.nan)
            else:
                kill_or_stop(due)

    def detached(self, session: Session) -> None:
        """Remove the hooks."""
        self._pending = []
        for handle in self._handles:
            handle.remove()

    def _take(self, due: Fault) -> None:
        self._pending.remove(due)
        _injected.add(due)
        _write_mark(fault=str(due))

    def _nan_in_backward(self, session: Session, grad: Tensor) -> Tensor | None:
        due = [each for each in self._pending if each.step == session.step + 1 and each.kind == "nan"]
        for each in due:
            self._take(each)
        return grad * torch.nan if due else None


class AttachOnly(StepObserver):
    """Ends the script at the end of `laconic.attach`, when all workers have come there."""

    def attached(self, session: Session) -> None:
        """Wait for all workers, record the plan, and end the script."""
        session.gather([0])
        _write_mark(plan=repr(session.plan))
        time.sleep(EXIT_DELAY_S)
        raise SystemExit(0)


@dataclass(frozen=True)
class Mark:
    """What a worker has recorded: the plan that it attached, a fault that it injected, or its timeout at that time."""

    worker: int
    time_s: float
    plan: str | None = None
    fault: str | None = None
    timeout_s: float | None = None


def _write_mark(plan: str | None = None, fault: str | None = None, timeout_s: float | None = None) -> None:
    folder = os.environ.get(MARKS)
    if folder is not None:
        mark = Mark(int(os.environ.get("RANK", "0")), time.time(), plan, fault, timeout_s)
        with Path(folder, f"marks-{mark.worker}.jsonl").open("a") as file:
            file.write(json.dumps(asdict(mark)) + "\n")


def read_marks(folder: Path) -> list[Mark]:
    """Read what all workers of this machine have recorded, in the order of time."""
    lines = [line for path in folder.glob("marks-*.jsonl") for line in path.read_text().splitlines()]
    return sorted((Mark(**json.loads(line)) for line in lines), key=lambda mark: mark.time_s)


def flip_a_bit(params: Mapping[str, Tensor]) -> None:
    """Flip a mantissa bit of the largest number of the first parameter, where later steps do not round it away."""
    for first in [own for p in params.values() if (own := local_of(p)).numel()][
        :1
    ]:  # a worker may hold empty shards only
        index = tuple(int(i) for i in torch.unravel_index(first.abs().argmax(), first.shape))
        number = first[index].reshape(1).clone()
        number.view(torch.uint8)[max(0, number.element_size() - 2)] ^= 1 << 3
        first[index] = number[0]


def kill_or_stop(due: Fault) -> None:
    """Kill this process, or stop it; a child process continues it after the duration, if there is one."""
    if due.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if due.seconds is None:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        with subprocess.Popen(["sh", "-c", f"sleep {due.seconds:f}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)
