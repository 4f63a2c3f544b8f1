"""Joining a run: this worker's name in it, the store, and the signs of life."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from laconic.elastic.errors import StoreLostError
from laconic.elastic.members import Meetings, Members, Rules
from laconic.elastic.store import BoundedStore
from laconic.elastic.watch import Watch

CONNECT_S = 30.0


def serve(port: int = 0, host: str = "0.0.0.0") -> TCPStore:
    """Host the store of a run in this process, which must outlive the workers; keep what is returned.

    It listens on all interfaces, and has no authentication: keep its port inside your network.
    """
    return TCPStore(host, port, is_master=True, wait_for_workers=False)


def join(
    store: str | Store,
    *,
    run: str | None = None,
    id: str | int | None = None,
    least: int = 1,
    expect: int | None = None,
    silence_s: float = 2.0,
    wait_s: float = 60.0,
) -> World:
    """Take part in a run whose workers may come and go.

    `store` is the "host:port" of a TCP store that outlives the workers (`serve`, or torchrun's --rdzv-endpoint), or any
    torch store. `run` tells runs in one store apart; by default it is torchrun's --rdzv-id. `id` is this worker's name
    in the run, a number or a word; by default the launcher's RANK, and under torchrun, which deals RANKs anew, machine,
    agent and LOCAL_RANK. No round is committed by fewer than `least` workers; more than half of all keeps two halves of
    a network from going on apart. The run begins when `expect` workers are there, by default `least`.

    A worker that shows no sign of life for `silence_s` is gone. `wait_s` is how long workers that are too few wait for
    more, and how long a worker that lives but does not come is waited for.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "join: torch.distributed is initialised already, and an elastic run makes its process group anew whenever "
            "workers come or go. Leave out init_process_group."
        )
    agent = os.getppid() if id is None and "TORCHELASTIC_RUN_ID" in os.environ else None
    name = _name_here(agent) if id is None else str(id)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run") if run is None else run
    for word, text in (("id", name), ("run", run)):
        if text is None or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):
            raise ValueError(
                f"join({word}={text!r}): {word} must be a number or a word of letters, digits, '.', '_' and '-', "
                f"such as join(..., {word}='site-a')."
            )
    expect = least if expect is None else expect
    if type(least) is not int or type(expect) is not int or not 1 <= least <= expect:
        raise ValueError(
            f"join(least={least!r}, expect={expect!r}): whole numbers of workers, 1 <= least <= expect, are needed."
        )
    for word, value in (("silence_s", silence_s), ("wait_s", wait_s)):
        if not value > 0:
            raise ValueError(f"join({word}={value!r}): {word} must be a number of seconds above 0.")
    assert name is not None
    return World(_connected(store), run, name, Rules(least, expect, wait_s), silence_s, agent)


def _name_here(agent: int | None) -> str | None:
    """Name a worker by who started it."""
    if agent is None:
        return os.environ.get("RANK")
    machine = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname()).strip("-.")[:60]
    return f"{machine or 'machine'}-{agent}-{os.environ['LOCAL_RANK']}"


def _connected(store: str | Store) -> Store:
    if not isinstance(store, str):
        return store
    host, _, port = store.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"join({store!r}): the store's address is host:port, such as 'node-0:29400'.")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        raise StoreLostError(
            f"join({store!r}): no store answers there ({str(error).partition(chr(10))[0]}). Host it first, with "
            "laconic.elastic.serve(port) in a process that outlives the workers."
        ) from error


class World:
    """One worker's place in a run. `tag` tells this process from earlier ones with the same id.

    `agent` is the process that started this one and starts it again, if that is torchrun's.
    """

    def __init__(
        self, store: Store, run: str, id: str, rules: Rules, silence_s: float, agent: int | None = None
    ) -> None:
        self.id = id
        self._agent = agent
        self.tag = f"{id}#{uuid.uuid4().hex[:8]}"
        self.timeout_s = 1800.0
        """How long torch itself lets a collective take; whoever is lost is found out long before."""
        self.store = BoundedStore(store)
        self._prefix = f"laconic/{run}"
        self.watch = Watch(self.store, self._prefix, id, self.tag, silence_s)
        self.meetings = Meetings(self.store, self._prefix, self.watch, rules)

    @property
    def orphaned(self) -> bool:
        """Whether the agent that started this worker is gone: when it is back, it will start another in its place."""
        return self._agent is not None and os.getppid() != self._agent

    def prefix_of(self, members: Members) -> str:
        """Name the part of the store that belongs to one attempt to form a group."""
        return f"{self._prefix}/{members.attempt}"

    def get_ready(self, members: Members, call_off: Callable[[], None]) -> None:
        """Say that this member is here, and wait until all others have said so."""
        self.store.set(f"{self.prefix_of(members)}/ready/{self.tag}", "")
        keys = [f"{self.prefix_of(members)}/ready/{seat.tag}" for seat in members.seats]
        while not self.store.check(keys):
            call_off()
            time.sleep(0.01)

    def fail(self, members: Members) -> None:
        """Let all others know that a group will not be formed."""
        if self.store.lost is None:
            self.store.set(f"{self.prefix_of(members)}/failed", "")

    def caller_off(self, members: Members) -> Callable[[], None]:
        """Make what raises as soon as a group cannot be formed any more."""

        def call_off() -> None:
            self.watch.raise_if_failed()
            gone = [seat.id for seat in members.seats if not self.watch.alive(seat.tag)]
            if gone:
                raise RuntimeError(f"worker {', '.join(gone)} is gone while the group was formed")
            if self.store.check([f"{self.prefix_of(members)}/failed"]):
                raise RuntimeError("another member could not form the group")

        return call_off

    def end(self, generation: int, step: int) -> None:
        """Note that a generation has come to the end of the run."""
        self.store.set(f"{self._prefix}/ended", json.dumps([generation, step]))

    def ended(self) -> tuple[int, int] | None:
        """Tell which generation has ended the run, after which step."""
        key = f"{self._prefix}/ended"
        if not self.store.check([key]):
            return None
        generation, step = json.loads(self.store.get(key))
        return generation, step

    def leave(self) -> None:
        """Take part no longer."""
        self.watch.close()
        self.store.close()

    def __repr__(self) -> str:
        return f"<World {self._prefix.removeprefix('laconic/')!r} as worker {self.id!r}>"
