"""Joining a run: this worker's id, its connection to the store, and its heartbeats."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from laconic.elastic.rendezvous import Membership, Rendezvous, Rules
from laconic.elastic.store import POLL_S, BoundedStore, HeartbeatMonitor
from laconic.errors import StoreLostError
from laconic.torch_private.distributed import PrefixStore, Store, TCPStore
from laconic.values import is_whole

CONNECT_S = 30.0


def serve(port: int = 0, host: str = "0.0.0.0") -> TCPStore:
    """Host the store of a run in this process, which must outlive the workers; keep the returned object.

    The store listens on the address `host` alone, by default on all interfaces. It has no authentication: keep its port
    inside your network.
    """
    listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listening.getsockname()[1]
    # torch's other backend reads in one thread: a client that sends half a message blocks it for good.
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(), use_libuv=True
    )


def join(
    store: str | Store,
    *,
    run: str | None = None,
    id: str | int | None = None,
    least: int = 1,
    expect: int | None = None,
    heartbeat_timeout_s: float = 2.0,
    wait_s: float = 60.0,
) -> ElasticWorld:
    """Join a run whose workers may come and go.

    `store` is the "host:port" of a TCP store that outlives the workers (`serve`, or torchrun's --rdzv-endpoint), or any
    torch store. `run` separates runs in one store; by default it is torchrun's --rdzv-id. `id` is this worker's name
    in the run, a number or a word. The default is the launcher's RANK; under torchrun, which changes RANKs at a
    restart, it is made of machine, agent and LOCAL_RANK. Fewer than `least` workers never commit a step; with more
    than half of all workers, two parts of a divided network cannot both continue. The run begins when `expect` workers
    have joined, by default `least`.

    A worker without a heartbeat for `heartbeat_timeout_s` is dead. `wait_s` is how long workers that are too few wait
    for more, and how long they wait for a worker that is alive but does not come to the rendezvous.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "join: torch.distributed is initialised already, and an elastic run makes a new process group whenever "
            "workers come or go. Leave out init_process_group."
        )
    agent = os.getppid() if id is None and "TORCHELASTIC_RUN_ID" in os.environ else None
    name = _default_id(agent) if id is None else str(id)
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run") if run is None else run
    for word, text in (("id", name), ("run", run)):
        if text is None or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", text):
            raise ValueError(
                f"join({word}={text!r}): {word} must be a number or a word of letters, digits, '.', '_' and '-', "
                f"such as join(..., {word}='site-a')."
            )
    expect = least if expect is None else expect
    if not is_whole(least) or not is_whole(expect, least):
        raise ValueError(
            f"join(least={least!r}, expect={expect!r}): both must be whole numbers, with 1 <= least <= expect."
        )
    for word, value in (("heartbeat_timeout_s", heartbeat_timeout_s), ("wait_s", wait_s)):
        if not value > 0:
            raise ValueError(f"join({word}={value!r}): {word} must be a number of seconds above 0.")
    assert name is not None
    return ElasticWorld(_connected(store), run, name, Rules(least, expect, wait_s), heartbeat_timeout_s, agent)


def _default_id(agent: int | None) -> str | None:
    """Name a worker by its rank, or under torchrun by machine, agent and local rank."""
    if agent is None:
        return os.environ.get("RANK")
    machine = re.sub(r"[^A-Za-z0-9.]+", "-", socket.gethostname()).strip("-.")[:60]
    return f"{machine or 'machine'}-{agent}-{os.environ['LOCAL_RANK']}"


def _connected(store: str | Store) -> Store:
    if not isinstance(store, str):
        return store
    host, _, port = store.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"join({store!r}): the address of the store must be host:port, such as 'node-0:29400'.")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        raise StoreLostError(
            f"join({store!r}): no store answers there ({str(error).partition(chr(10))[0]}). Host it first, in a "
            f"process that outlives the workers: python -m laconic.elastic --port {port}, or elastic.serve({port})."
        ) from error


class ElasticWorld:
    """The connection of one worker to a run. `tag` identifies this process among those with the same id.

    `agent` is the process id of the torchrun agent that started this worker, if one did.
    """

    def __init__(
        self, store: Store, run: str, id: str, rules: Rules, heartbeat_timeout_s: float, agent: int | None = None
    ) -> None:
        self.run, self.id, self._agent = run, id, agent
        self.tag = f"{id}#{uuid.uuid4().hex[:8]}"
        self.timeout_s = 1800.0
        """How long torch lets a collective take. Lost workers are found long before."""
        name = f"the store of this run at {store.host}:{store.port}" if isinstance(store, TCPStore) else "the store"
        self.store = BoundedStore(PrefixStore(f"laconic/{run}", store), name=name)
        self.monitor = HeartbeatMonitor(self.store, id, self.tag, heartbeat_timeout_s)
        self.rendezvous = Rendezvous(self.store, self.monitor, rules)

    @property
    def orphaned(self) -> bool:
        """Whether the torchrun agent of this worker is gone. When it is back, it starts another worker."""
        return self._agent is not None and os.getppid() != self._agent

    def barrier(self, name: str, membership: Membership) -> None:
        """Wait until all members have come to this point of forming a group."""
        keys = {each.tag: f"{membership.attempt}/{name}/{each.tag}" for each in membership.members}
        self.store.set(keys[self.tag], "")
        while not self.store.check(list(keys.values())):
            self.check_forming(membership)
            time.sleep(POLL_S)

    def report_failure(self, membership: Membership) -> None:
        """Let the other members know that the group cannot be formed."""
        if self.store.lost is None:
            self.store.set(f"{membership.attempt}/failed", "")

    def check_forming(self, membership: Membership) -> None:
        """Raise an error if the group of a membership cannot be formed any more."""
        self.monitor.raise_if_failed()
        dead = [each.id for each in membership.members if not self.monitor.alive(each.tag)]
        if dead:
            raise RuntimeError(f"worker {', '.join(dead)} died while the group was formed")
        if self.store.check([f"{membership.attempt}/failed"]):
            raise RuntimeError("another member could not form the group")

    def record_end(self, generation: int, step: int) -> None:
        """Record in the store that a generation has finished the run."""
        self.store.set("ended", json.dumps([generation, step]))

    def ended(self) -> tuple[int, int] | None:
        """Return the generation that finished the run, and its last step; None if the run has not ended."""
        found = self.store.read(["ended"])
        return None if found is None else tuple(json.loads(found[0]))

    def leave(self) -> None:
        """End the heartbeats."""
        self.monitor.close()

    def __repr__(self) -> str:
        return f"<ElasticWorld {self.run!r} as worker {self.id!r}>"
