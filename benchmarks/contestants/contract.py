"""What a contestant is: a name, its settings in words, and a function that makes it ready to train on one worker."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from laconic.tools.compare.runs import VALIDATE_EVERY
from laconic.tools.lab.tasks import Batch, Lab, loss_of

SECONDS = 100.0
SIOCGIFADDR = 0x8915  # of Linux: the address of an interface


def nothing() -> None:
    """Do nothing: most contestants need no more than forward, backward and step."""


def every_few_steps(step: int) -> bool:
    """Whether workers that are in step with each other validate now."""
    return step % VALIDATE_EVERY == 0


@dataclass
class Training:
    """A contestant that is ready to train on one worker.

    `model` is called, `module` holds the weights, `inner` is the optimizer whose learning rate follows the schedule,
    and `optimizer` is what the loop steps. `is_due` says after which steps all workers can validate together.
    """

    module: nn.Module
    model: nn.Module
    inner: Optimizer
    optimizer: Any
    backward: Callable[[Tensor], object] = Tensor.backward
    after_step: Callable[[], object] = nothing
    is_due: Callable[[int], bool] = every_few_steps
    close: Callable[[], object] = nothing
    alone: bool = False  # each worker validates its own weights

    def step(self, batch: Batch, lr: float) -> None:
        """One step of training: the same for all contestants."""
        for group in self.inner.param_groups:
            group["lr"] = lr
        self.backward(loss_of(self.model, batch))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()


@dataclass(frozen=True)
class Host:
    """Where a worker runs: its rank, a folder that all workers see, and a group that is not on the link under study."""

    rank: int
    workers: int
    folder: Path
    control: dist.ProcessGroup
    settings: Lab
    module: nn.Module

    @property
    def address(self) -> str:
        """The address of this host on the link under study."""
        name = os.environ["GLOO_SOCKET_IFNAME"].encode()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            answer = fcntl.ioctl(any_socket.fileno(), SIOCGIFADDR, struct.pack("256s", name))
        return socket.inet_ntoa(answer[20:24])

    def from_worker_0(self, text: str) -> str:
        """Return on every worker the text of worker 0, such as the address of its server."""
        file = self.folder / "from-worker-0"
        if self.rank == 0:
            file.write_text(text)
        dist.barrier(self.control)
        return file.read_text()

    def adamw(self) -> AdamW:
        """The optimizer of the lab."""
        return AdamW(self.module.parameters(), lr=self.settings.lr, betas=(0.9, 0.95), weight_decay=0.01)

    def ddp(self) -> tuple[DistributedDataParallel, Training]:
        """DDP around the module, and its training."""
        model, inner = DistributedDataParallel(self.module, bucket_cap_mb=self.settings.bucket_mb), self.adamw()
        return model, Training(self.module, model, inner, inner)

    def bare(self) -> Training:
        """The training of the module by itself, for libraries that take it as it is."""
        inner = self.adamw()
        return Training(self.module, self.module, inner, inner)


@dataclass(frozen=True)
class Contestant:
    """A library with its settings in words. `needs` is the package that it is part of."""

    name: str
    kind: Literal["baseline", "peer", "ours"]
    settings: str
    build: Callable[[Host], Training]
    needs: str = "torch"
    seconds: float = SECONDS  # of training, at most
    swept: bool = False  # a setting that was tried and is not the best one: left out of a plain run
