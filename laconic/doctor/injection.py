"""Fault injection: a step observer that makes this worker fail, to test a training before it happens.

    LACONIC_OBSERVERS=laconic.doctor.injection:from_env
    LACONIC_INJECT=kill:2@300,stop:1@100:5s,nan:0@50,flip:3@70,slow:1@20:2s

docs/doctor.md describes the faults. A worker is its rank in the group of the session. Each fault is injected once: not
again after a second `attach` in the same process, nor after the launcher has restarted the workers.

With LACONIC_UNTIL=attach the script ends, on all workers together, at the end of `laconic.attach`. `laconic doctor`
sets these variables.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from laconic.doctor.exit_recorder import faults_file
from laconic.session.observers import StepObserver

if TYPE_CHECKING:
    from laconic import Session

FACTORY = "laconic.doctor.injection:from_env"
"""The factory of this observer, as LACONIC_OBSERVERS names it."""
INJECT = "LACONIC_INJECT"
UNTIL = "LACONIC_UNTIL"
MARKS = "LACONIC_MARKS"
"""A folder in which each worker records the faults that it injects: a killed worker cannot report them later."""
EXIT_DELAY_S = 0.5  # a worker that exits at once could break the last collective of a slower one

Kind: TypeAlias = Literal["kill", "stop", "nan", "flip", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXAMPLE = "kill:2@300, stop:1@100:5s, nan:0@50, flip:3@70 or slow:1@20:2s"
_FAULT = re.compile(r"(?P<kind>[a-z]+):(?P<worker>\d+)@(?P<step>\d+)(:(?P<seconds>\d+(\.\d+)?)s)?")
_CONTINUE_PARENT = (  # it signals its parent only while that is still the process that started it
    "import os, signal, sys, time; parent = os.getppid(); time.sleep(float(sys.argv[1])); "
    "os.getppid() == parent == int(sys.argv[2]) and os.kill(parent, signal.SIGCONT)"
)

logger = logging.getLogger(__name__)
_injected: set[Fault] = set()


class InjectionError(ValueError):
    """A fault that cannot be parsed or injected."""


class StoppedAfterAttach(SystemExit):
    """Ends a script at the end of `laconic.attach`, with exit code 0."""


@dataclass(frozen=True)
class Fault:
    """A fault of one worker in one step of the optimizer, counted from 1.

    >>> fault("stop:1@100:5s")
    Fault(kind='stop', worker=1, step=100, seconds=5.0)
    >>> str(fault("kill:2@300"))
    'kill:2@300'
    """

    kind: Kind
    worker: int
    step: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.step < 1:
            raise InjectionError(f"{self}: steps count from 1. Write {self.kind}:{self.worker}@1.")
        if self.kind == "slow" and self.seconds is None:
            raise InjectionError(f"{self}: slow needs a duration. Write {self}:2s.")
        if self.kind not in ("slow", "stop") and self.seconds is not None:
            plain = f"{self.kind}:{self.worker}@{self.step}"
            raise InjectionError(f"{self}: only stop and slow take a duration. Write {plain}.")

    def __str__(self) -> str:
        duration = "" if self.seconds is None else f":{self.seconds:g}s"
        return f"{self.kind}:{self.worker}@{self.step}{duration}"


def fault(text: str) -> Fault:
    """Parse one fault."""
    match = _FAULT.fullmatch(text.strip())
    kind = None if match is None else next((each for each in KINDS if each == match["kind"]), None)
    if match is None or kind is None:
        raise InjectionError(
            f"{text.strip()!r} is not a fault: write kind:worker@step, with kind {', '.join(KINDS[:-1])} or "
            f"{KINDS[-1]}, and a duration such as :5s after stop and slow. For example {EXAMPLE}."
        )
    seconds = None if match["seconds"] is None else float(match["seconds"])
    return Fault(kind, int(match["worker"]), int(match["step"]), seconds)


def faults(text: str) -> tuple[Fault, ...]:
    """Parse faults separated by commas.

    >>> faults("kill:2@300, nan:0@50")[1].kind
    'nan'
    """
    return tuple(fault(part) for part in text.split(",") if part.strip())


def check_faults(wanted: Iterable[Fault], workers: int) -> None:
    """Refuse faults of workers that do not exist."""
    for each in wanted:
        if each.worker >= workers:
            raise InjectionError(
                f"{each}: there are {workers} workers, counted from 0. Use a worker from 0 to {workers - 1}."
            )


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
        self._handles: list[RemovableHandle] = []

    def attached(self, session: Session) -> None:
        """Select the faults of this worker; gradients become NaN in hooks, before DDP averages them in backward."""
        remaining = [each for each in self._wanted if each not in _injected]
        absent = [str(each) for each in remaining if each.worker >= session.workers]
        if absent:  # not an error: the group may have lost workers
            logger.warning("%s: %s ignored, there are %d workers.", INJECT, ", ".join(absent), session.workers)
        worker = 0 if session.group is None else session.group.rank()
        self._pending = [each for each in remaining if each.worker == worker]
        if any(each.kind == "nan" for each in self._pending):
            hook, trained = partial(self._nan_in_backward, session), session.parameters.values()
            self._handles = [p.register_hook(hook) for p in trained if p.requires_grad]

    def before_step(self, session: Session) -> None:
        """Inject the faults of the step that begins."""
        while (due := self._next_due(session)) is not None:
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

    def _next_due(self, session: Session, kind: Kind | None = None) -> Fault | None:
        due = (each for each in self._pending if each.step == session.step + 1 and kind in (None, each.kind))
        return next(due, None)

    def _take(self, due: Fault) -> None:
        self._pending.remove(due)
        _injected.add(due)
        folder = os.environ.get(MARKS)
        if folder is not None:
            with faults_file(Path(folder), _rank()).open("a") as file:
                file.write(json.dumps({"fault": str(due), "time_s": time.time()}) + "\n")

    def _nan_in_backward(self, session: Session, grad: Tensor) -> Tensor | None:
        due = self._next_due(session, "nan")
        if due is None:
            return None
        self._take(due)
        return grad * torch.nan


class AttachOnly(StepObserver):
    """Ends the script at the end of `laconic.attach`, when all workers have come there."""

    def attached(self, session: Session) -> None:
        """Wait for all workers, write down the plan, and raise `StoppedAfterAttach`."""
        session.gather([0])
        folder = os.environ.get(MARKS)
        if folder is not None:
            text = json.dumps({"plan": repr(session.plan), "workers": session.workers})
            attached_file(Path(folder), _rank()).write_text(text)
        time.sleep(EXIT_DELAY_S)
        raise StoppedAfterAttach(0)


def attached_file(folder: Path, worker: int) -> Path:
    """The file in which a worker records that it has attached its plan."""
    return folder / f"attached-{worker}.json"


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def flip_a_bit(params: Mapping[str, Tensor]) -> None:
    """Flip a mantissa bit of the largest number of the first parameter, where later steps do not round it away."""
    from torch.distributed.tensor import DTensor

    local = [(p.to_local() if isinstance(p, DTensor) else p).detach() for p in params.values()]
    for first in [p for p in local if p.numel()][:1]:  # a worker may hold empty shards only
        index = tuple(int(i) for i in torch.unravel_index(first.abs().argmax(), first.shape))
        number = first[index].reshape(1).clone()
        number.view(torch.uint8)[max(0, number.element_size() - 2)] ^= 1 << 3
        first[index] = number[0]


def kill_or_stop(due: Fault) -> None:
    """Kill this process, or stop it; a child process continues it after the duration, if there is one."""
    if due.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    arguments = ("-I", "-S", "-c", _CONTINUE_PARENT, str(due.seconds), str(os.getpid()))
    helper = None if due.seconds is None else subprocess.Popen([sys.executable, *arguments])
    os.kill(os.getpid(), signal.SIGSTOP)
    if helper is not None:
        helper.wait()
