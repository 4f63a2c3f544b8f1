"""Levels of process groups, innermost first.

A plan names a level by how many workers are in one of its groups. The members are consecutive workers of the whole
group, or those of groups that the user has already, from a DeviceMesh or as process groups.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from laconic.comm.queue import CollectiveQueue
from laconic.comm.timeout import check_timeout_s
from laconic.exchange import Level, check_sizes, level_name
from laconic.ledger import Ledger
from laconic.torch_private.distributed import LocalGroup, destroy_group, flat_group, new_group
from laconic.values import is_number

Given: TypeAlias = DeviceMesh | Sequence[dist.ProcessGroup]


class GroupWithQueue(LocalGroup):
    """A process group that brings a queue of its own, as the simulator's does."""

    def queue(self, ledger: Ledger, level: str) -> CollectiveQueue:
        """Return the queue of this worker in this group."""
        raise NotImplementedError

    def part(self, size: int) -> dist.ProcessGroup:
        """Return the group of `size` consecutive workers that this one is in."""
        raise NotImplementedError


class Levels:
    """The groups that this worker is in, each with its queue; the one of all workers always exists.

    `prepare` makes the others, once all workers have agreed on the plan. `device` is where the averaged tensors are.
    `shards` is a group that no plan names: the workers that hold the shards of one sharded replica, this one included.
    """

    def __init__(
        self,
        plan_levels: Sequence[Level],
        group: dist.ProcessGroup | None,
        ledger: Ledger,
        given: Given | None = None,
        timeout_s: float | None = None,
        device: torch.device | None = None,
        shards: dist.ProcessGroup | None = None,
    ) -> None:
        check_timeout_s(timeout_s)
        self._given = {} if given is None else _by_size(given)
        self._whole = group
        self._ledger, self._timeout_s, self._device = ledger, timeout_s, device
        self.check(plan_levels)  # before any group is made: a worker that is refused leaves no other waiting
        self._made: list[dist.ProcessGroup] = []
        self.world = self._queue(group, "world")
        self._queues: dict[Level, CollectiveQueue] = {None: self.world, self.world.workers: self.world}
        self._shards_group = shards
        self.shards = None if shards is None else self._queue(shards, "shards")
        _open.add(self)

    def _queue(self, group: dist.ProcessGroup | None, name: str) -> CollectiveQueue:
        if isinstance(group, GroupWithQueue):
            return group.queue(self._ledger, name)
        return CollectiveQueue(group, self._ledger, name, timeout_s=self._timeout_s, device=self._device)

    @property
    def workers(self) -> int:
        """How many workers there are in all."""
        return 1 if self._whole is None else self._whole.size()

    def check(self, plan_levels: Sequence[Level]) -> None:
        """Refuse levels that do not fit these workers, or of which the last is not all of them."""
        sizes = [self._size(level) for level in plan_levels]
        check_sizes(sizes, self.workers)
        for size in sizes:
            if self._given and size not in (1, self.workers, *self._given):
                raise ValueError(
                    f"the plan asks for groups of {size}, and levels= has groups of "
                    f"{', '.join(map(str, self._given))}. Make the two agree."
                )

    def prepare(self, plan_levels: Sequence[Level]) -> None:
        """Make the groups of these levels, on all workers together, unless they exist."""
        self.check(plan_levels)
        for level in plan_levels:
            size = self._size(level)
            if size not in self._queues:
                self._queues[size] = self._queue(self._group(size), level_name(size))
            self._queues[level] = self._queues[size]

    def regrouped(self, plan_levels: Sequence[Level], group: dist.ProcessGroup) -> Levels:
        """Make the levels of another group, with the same ledger and timeout."""
        levels = Levels(plan_levels, group, self._ledger, None, self._timeout_s, self._device, self._shards_group)
        levels.prepare(plan_levels)
        return levels

    def __getitem__(self, level: Level) -> CollectiveQueue:
        """Return the queue of a level that was prepared."""
        return self._queues[level]

    def named(self) -> list[Level]:
        """List the levels that plans have named so far."""
        return [level for level in self._queues if level is not None]

    def _all(self) -> list[CollectiveQueue]:
        return [*dict.fromkeys(self._queues.values()), *([] if self.shards is None else [self.shards])]

    def close(self) -> None:
        """End the threads of all queues, and destroy the groups that were made for them."""
        made = [] if any(queue.broken for queue in self._all()) else self._made
        self._made = []
        for queue in self._all():
            queue.close()
        for group in made:
            destroy_group(group)

    def leave(self) -> None:
        """End the threads of all queues, soon also where one waits for another worker."""
        for queue in self._all():
            queue.leave()

    def abandon(self) -> None:
        """Leave all queues behind, with their collectives in flight."""
        self._made = []
        for queue in self._all():
            queue.abandon()

    def away(self, limit_s: float) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the other workers wait for this one for up to `limit_s` more."""
        if not is_number(limit_s) or limit_s <= 0:
            raise ValueError(
                f"away(limit_s={limit_s!r}): it must be a number of seconds above 0, such as 600: how long this worker "
                "is away at most. After it, the others take it for lost."
            )
        return self._away(limit_s)

    @contextlib.contextmanager
    def _away(self, limit_s: float) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for queue in self._all():
                if queue.timeout is not None:
                    stack.enter_context(queue.timeout.away(limit_s))
            yield

    def cancel_wait(self) -> None:
        """End the wait for a collective among all workers that is in progress."""
        for queue in (self.world, self.shards):
            if queue is not None and queue.timeout is not None:
                queue.timeout.cancel()

    def raise_if_broken(self) -> None:
        """Raise the error that broke a collective in backward: DDP's C++ would not pass it on."""
        for queue in self._all():
            if queue.broken is not None:
                raise queue.broken

    def _size(self, level: Level) -> int:
        if level is None:
            return self.workers
        return workers_on_this_machine(self.workers) if level == "machine" else level

    def _group(self, size: int) -> dist.ProcessGroup | None:
        if self._whole is None or size == 1:
            return None
        if isinstance(self._whole, GroupWithQueue):
            return self._whole.part(size)
        if self._given:
            return self._given[size]
        self._made.append(subgroup_of(self._whole, size))
        return self._made[-1]


_open: weakref.WeakSet[Levels] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # the threads are not in the child
    os.register_at_fork(after_in_child=_open.clear)


@atexit.register
def _close_all() -> None:
    """Close the levels of sessions that nobody has detached, before the interpreter shuts down.

    A thread of gloo lets go of the tensors of a collective after it has woken who waits for it, on a busy machine much
    later. In an interpreter that shuts down this aborts the process ("terminate called without an active exception").
    The last reference to a group ends its threads.
    """
    for each in list(_open):
        with contextlib.suppress(RuntimeError):
            each.leave()
            each.close()


def subgroup_of(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Make the subgroup of `size` consecutive workers of `group` that this worker is in.

    Where `group` is the whole world, every worker makes every subgroup, as torch does. Otherwise only its members make
    a subgroup: other groups of the same world need not make theirs at the same time.
    """
    ranks = dist.get_process_group_ranks(group)
    if size < 1 or len(ranks) % size:
        raise ValueError(
            f"{len(ranks)} workers cannot be divided into groups of {size}. Choose a size that divides {len(ranks)}."
        )
    backend = dist.get_backend(group)
    parts = [ranks[first : first + size] for first in range(0, len(ranks), size)]
    mine = next(index for index, members in enumerate(parts) if dist.get_rank() in members)
    if len(ranks) < dist.get_world_size():
        return new_group(parts[mine], backend)
    made = [dist.new_group(members, backend=backend) for members in parts][mine]
    if not isinstance(made, dist.ProcessGroup):
        raise RuntimeError("torch.distributed.new_group() did not make this worker a member of its own group.")
    return made


def workers_on_this_machine(most: int) -> int:
    """Return how many workers share a machine: what the launcher set, else the number of GPUs, else all, `most`."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdigit() and int(local) > 0:
        return min(int(local), most)
    return min(torch.accelerator.device_count() or most, most)


def whole_of(given: Given) -> dist.ProcessGroup:
    """Find the group of all workers that a mesh or nested groups cover."""
    return list(_by_size(given).values())[-1]


def _by_size(given: Given) -> dict[int, dist.ProcessGroup]:
    groups = _mesh_groups(given) if isinstance(given, DeviceMesh) else list(given)
    if not groups or not all(isinstance(group, dist.ProcessGroup) for group in groups):
        raise TypeError(
            f"levels={given!r}: give a DeviceMesh, or this worker's process groups in a list, innermost first."
        )
    members = [set(dist.get_process_group_ranks(group)) for group in groups]
    for inner, outer in pairwise(members):
        if not inner < outer:
            raise ValueError(
                f"levels: the group of workers {sorted(inner)} is not a part of the next, {sorted(outer)}. Give this "
                "worker's groups innermost first, each inside the next."
            )
    return {group.size(): group for group in groups}


def _mesh_groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Take the last dimension of a mesh as the innermost level, then the last two together, and so on."""
    names = mesh.mesh_dim_names
    if mesh.ndim == 1:
        return [mesh.get_group()]
    if names is None:
        raise ValueError(
            "levels: this DeviceMesh has no names for its dimensions, and groups are found by them. Make it with "
            "mesh_dim_names=(...), the innermost (fastest) dimension last."
        )
    groups = [mesh[names[-1]].get_group()]
    for first in range(mesh.ndim - 2, 0, -1):
        groups.append(flat_group(mesh[names[first:]]))
    everyone = mesh.size() == dist.get_world_size() and dist.group.WORLD is not None
    groups.append(dist.group.WORLD if everyone else flat_group(mesh))  # type: ignore[arg-type]
    return groups
