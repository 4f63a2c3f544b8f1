"""Faults on purpose: what LACONIC_INJECT asks of this worker, so that a training can be tried before they happen.

    LACONIC_INJECT="kill:2@300,stop:1@100:5s,nan:0@50,flip:3@70,slow:1@20:2s"

is worker 2 killed in step 300, worker 1 stopped in step 100 for five seconds, NaN in worker 0's gradients of step 50, a
bit flipped in a weight of worker 3 in step 70, and worker 1 asleep for two seconds in step 20. Workers are counted in
the group that `attach` was given. Each fault is made once: not again after another `attach`, nor after a launcher has
started the workers anew. `laconic doctor --inject` sets the variable; without it nothing here costs anything.

`laconic doctor --script` uses `after_attach`: the script ends once its workers have agreed.
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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.checks.agreement import agree
from laconic.comm.queue import CollectiveQueue
from laconic.session.model_state import local_of

INJECT = "LACONIC_INJECT"
UNTIL = "LACONIC_UNTIL"
"""Set to "attach", a script ends right after `laconic.session.session`."""
MARKS = "LACONIC_MARKS"
"""A folder in which workers note what they did to themselves, and when: whoever is killed cannot tell later."""
LEAVE_S = 0.5

Kind: TypeAlias = Literal["kill", "stop", "nan", "flip", "slow"]
KINDS: tuple[Kind, ...] = get_args(Kind)
EXAMPLE = "kill:2@300, stop:1@100:5s, nan:0@50, flip:3@70 or slow:1@20:2s"
_WRITTEN = re.compile(r"(?P<kind>[a-z]+):(?P<worker>\d+)@(?P<step>\d+)(:(?P<seconds>\d+(\.\d+)?)s)?")


logger = logging.getLogger(__name__)
_made: set[Fault] = set()


class InjectionError(ValueError):
    """A fault that cannot be read or made. The message is ready to be shown."""


class StoppedAfterAttach(SystemExit):
    """Ends a script that was run only up to `laconic.session.session`. Its exit code is 0."""


@dataclass(frozen=True)
class Fault:
    """One fault, on one worker, in one step of the optimizer, counted from 1.

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
            raise InjectionError(f"{self}: a slow worker sleeps for a time. Write it behind, such as {self}:2s.")
        if self.kind not in ("slow", "stop") and self.seconds is not None:
            plain = f"{self.kind}:{self.worker}@{self.step}"
            raise InjectionError(f"{self}: only stop and slow last for a time. Write {plain}.")

    def __str__(self) -> str:
        lasting = "" if self.seconds is None else f":{self.seconds:g}s"
        return f"{self.kind}:{self.worker}@{self.step}{lasting}"


def fault(text: str) -> Fault:
    """Read one fault."""
    match = _WRITTEN.fullmatch(text.strip())
    kind = None if match is None else next((each for each in KINDS if each == match["kind"]), None)
    if match is None or kind is None:
        raise InjectionError(
            f"{text.strip()!r} is no fault: it is written kind:worker@step, with kind {', '.join(KINDS[:-1])} or "
            f"{KINDS[-1]}, and :seconds behind stop and slow. For example {EXAMPLE}."
        )
    seconds = None if match["seconds"] is None else float(match["seconds"])
    return Fault(kind, int(match["worker"]), int(match["step"]), seconds)


def faults(text: str) -> tuple[Fault, ...]:
    """Read faults between commas.

    >>> faults("kill:2@300, nan:0@50")[1].kind
    'nan'
    """
    return tuple(fault(part) for part in text.split(",") if part.strip())


def check_faults(wanted: Iterable[Fault], workers: int) -> None:
    """Refuse faults of workers that there are not."""
    for each in wanted:
        if each.worker >= workers:
            raise InjectionError(
                f"{each}: there is no worker {each.worker} among {workers}, which count from 0 to {workers - 1}."
            )


class Injection:
    """The faults of this worker. `next_step` tells the step of the optimizer that comes next."""

    def __init__(self, mine: Iterable[Fault], params: Mapping[str, Tensor], next_step: Callable[[], int]) -> None:
        self._params = params
        self._next_step = next_step
        self._open = list(mine)
        # Gradients travel inside backward on a DDP model, so they are spoiled there, as they come.
        hooked = [p for p in params.values() if p.requires_grad] if any(f.kind == "nan" for f in self._open) else []
        self._handles = [p.register_hook(self._spoil) for p in hooked]

    def before_step(self) -> None:
        """Do to this worker what is due, at the beginning of `optimizer.step()`."""
        for each in [each for each in self._open if each.step == self._next_step()]:
            self._open.remove(each)
            note(each)
            if each.kind == "slow":
                time.sleep(each.seconds or 0.0)
            elif each.kind == "flip":
                flip_a_bit(self._params)
            elif each.kind == "nan":  # no hook was called: gradients that autograd does not hand to the parameters
                self._spoil_what_there_is()
            else:
                hurt(each)

    def remove(self) -> None:
        """Do nothing more to this worker."""
        self._open = []
        for handle in self._handles:
            handle.remove()

    def _spoil(self, grad: Tensor) -> Tensor | None:
        due = next((each for each in self._open if each.kind == "nan" and each.step == self._next_step()), None)
        if due is None:
            return None
        self._open.remove(due)
        note(due)
        return grad * torch.nan

    def _spoil_what_there_is(self) -> None:
        for p in self._params.values():
            if p.grad is not None:
                p.grad.mul_(torch.nan)
                return


def injected_from_env(
    group: dist.ProcessGroup | None, params: Mapping[str, Tensor], next_step: Callable[[], int]
) -> Injection | None:
    """Read what LACONIC_INJECT asks of this worker of `group`; None if nothing."""
    text = os.environ.get(INJECT)
    if not text or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    wanted = faults(text)
    workers = 1 if group is None else group.size()
    absent = [str(each) for each in wanted if each.worker >= workers and each not in _made]
    if absent:  # not an error: a group may have lost workers since
        logger.warning("%s=%s: there are %d workers, from 0: %s is not made.", INJECT, text, workers, ", ".join(absent))
    worker = 0 if group is None else group.rank()
    mine = [each for each in wanted if each.worker == worker and each not in _made]
    return Injection(mine, params, next_step) if mine else None


def flip_a_bit(params: Mapping[str, Tensor]) -> None:
    """Flip a bit of the mantissa of the greatest number of the first parameter: one that no later step rounds away."""
    for mine in map(local_of, params.values()):
        if mine.numel():
            with torch.no_grad():
                place = tuple(int(i) for i in torch.unravel_index(mine.abs().argmax(), mine.shape))
                number = mine[place].reshape(1).clone()
                number.view(torch.uint8)[max(0, number.element_size() - 2)] ^= 1 << 3
                mine[place] = number[0]
            return


def hurt(due: Fault) -> None:
    """Kill this process, or stop it; a helper lets it go on where a time was given."""
    if due.kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        return
    helper = None if due.seconds is None else _wake_me_after(due.seconds)
    os.kill(os.getpid(), signal.SIGSTOP)
    if helper is not None:
        helper.wait()


def _wake_me_after(seconds: float) -> subprocess.Popen[bytes]:
    # It signals its parent alone, and only while that is still this process.
    program = (
        "import os, signal, sys, time; parent = os.getppid(); time.sleep(float(sys.argv[1])); "
        "os.getppid() == parent == int(sys.argv[2]) and os.kill(parent, signal.SIGCONT)"
    )
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", program, str(seconds), str(os.getpid())])


def note(what: Fault) -> None:
    """Write down that a fault is being made now, here and for whoever injects."""
    _made.add(what)
    folder = os.environ.get(MARKS)
    if folder is not None:
        line = json.dumps({"fault": str(what), "time": time.time()})
        with Path(folder, f"faults-{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
            file.write(line + "\n")


def after_attach(queue: CollectiveQueue, plan: str) -> None:
    """End the script here, on all workers together, if it was started to see whether they agree."""
    if os.environ.get(UNTIL) != "attach":
        return
    agree(queue, "the end of laconic.session.session", {})  # nobody leaves while another still listens
    folder = os.environ.get(MARKS)
    if folder is not None:
        told = json.dumps({"plan": plan, "workers": queue.workers})
        Path(folder, f"attached-{os.environ.get('RANK', '0')}.json").write_text(told)
    time.sleep(LEAVE_S)
    raise StoppedAfterAttach(0)
