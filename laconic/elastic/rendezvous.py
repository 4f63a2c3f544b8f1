"""Rendezvous: workers agree through the store on who forms the next group.

Attempts are numbered in the store. A worker that wants to be in the next group, because the last one lost a member or
because the worker is new, registers for the open attempt with the snapshots that it holds. When every worker that is
expected and alive has registered, the first worker to notice writes the `Membership`, once, and opens the next
attempt. There is no leader, so no worker's death blocks an attempt for long.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from laconic.elastic.store import BoundedStore, HeartbeatMonitor
from laconic.errors import QuorumError

POLL_S = 0.03


@dataclass(frozen=True)
class Member:
    """A worker at a rendezvous, and the snapshots that it holds.

    `tag` identifies the process. `generation` is that of the snapshots, 0 if the worker has not been in a group yet.
    `in_memory` is False for a process that was killed, and started again from what it had saved.
    """

    id: str
    tag: str
    generation: int
    steps: tuple[int, ...]
    in_memory: bool = True

    @staticmethod
    def from_dict(found: dict[str, Any]) -> Member:
        """Read what `dataclasses.asdict` wrote, after a way through JSON."""
        return Member(**{**found, "steps": tuple(found["steps"])})

    @property
    def order(self) -> tuple[int, int, str]:
        """A sort key: numbers first, by value, then names."""
        return (0, int(self.id), "") if self.id.isdecimal() else (1, 0, self.id)


@dataclass(frozen=True)
class Membership:
    """The members of a new generation, in the order of their ranks. Every member derives the same facts from it.

    Only members of the newest generation decide about the step to continue from. A worker that was killed, and read
    its snapshots from a disk, counts only if no other is left: the disk may be behind.
    """

    attempt: int
    generation: int
    members: tuple[Member, ...]

    @cached_property
    def _newest(self) -> list[Member]:
        newest = max((each.generation, each.in_memory) for each in self.members)
        return [each for each in self.members if (each.generation, each.in_memory) == newest]

    @cached_property
    def base(self) -> int:
        """The step to continue from: the newest that all of the newest generation hold; from disks, that any holds."""
        held = [set(each.steps) for each in self._newest]
        common = set.intersection(*held) if self._newest[0].in_memory else None
        return max(common or set.union(*held))

    @cached_property
    def source(self) -> int:
        """The rank of the worker that sends its state to those that need it."""
        return next(rank for rank, each in enumerate(self.members) if self._holds_base(each))

    @cached_property
    def receivers(self) -> list[int]:
        """The ranks of the workers that need the state of another. In the first generation, all but one."""
        first = all(each.generation == 0 for each in self.members)
        ranks = [rank for rank, each in enumerate(self.members) if first or not self._holds_base(each)]
        return [rank for rank in ranks if rank != self.source]

    def _holds_base(self, member: Member) -> bool:
        return member in self._newest and self.base in member.steps


@dataclass(frozen=True)
class Rules:
    """When an attempt may close: with `least` workers, the first with `expect`; and how long to wait for more."""

    least: int
    expect: int
    wait_s: float


class Rendezvous:
    """The attempts of one run to form a group, as one worker takes part in them."""

    def __init__(self, store: BoundedStore, monitor: HeartbeatMonitor, rules: Rules) -> None:
        self._store, self._monitor, self._rules = store, monitor, rules

    def join(self, member: Member, is_over: Callable[[], bool]) -> Membership | None:
        """Register for attempts until one has this worker as a member. None if `is_over` becomes true first."""
        while True:
            attempt = self._store.add("attempt", 0)
            self._monitor.watch_for_joins(None)
            membership = self._join_attempt(attempt, member, is_over)
            if membership is None or member in membership.members:
                return membership

    def confirm(self, membership: Membership) -> None:
        """Record that all members hold the first snapshot of their generation: older ones may not continue."""
        holders = {each.tag: each.id for each in membership.members}
        self._store.set(f"holders/{membership.generation}", json.dumps(holders))
        self._raise_counter("generation", membership.generation)

    def _join_attempt(self, attempt: int, member: Member, is_over: Callable[[], bool]) -> Membership | None:
        # 1. Register, and watch the members of the last group: they are expected here, too.
        number = self._store.add(f"{attempt}/count", 1)
        self._store.set(f"{attempt}/member/{number}", json.dumps(asdict(member)))
        last = self._read_membership(attempt - 1)
        expected = () if last is None else last.members
        self._monitor.watch(each.tag for each in expected)
        registered: dict[int, Member] = {}
        most = (0, "")  # how many workers were here at most, and what was missing then
        begun_s = complete_since_s = time.monotonic()
        while True:
            self._monitor.raise_if_failed()
            if is_over():
                return None
            # 2. Has a worker closed the attempt?
            membership = self._read_membership(attempt)
            if membership is not None:
                self._open_next(membership)
                return membership
            # 3. Who is here and alive, and is anybody missing who is alive?
            self._read_registered(attempt, registered)
            present = sorted((m for m in registered.values() if self._monitor.alive(m.tag)), key=lambda m: m.order)
            tags = {each.tag for each in registered.values()}
            now = time.monotonic()
            missing = any(each.tag not in tags and self._monitor.alive(each.tag) for each in expected)
            if missing:
                complete_since_s = now
            # 4. Close the attempt, wait for more, or give up.
            problem = self._problem(present, expected)
            if problem is None:
                if not missing or now - begun_s >= self._rules.wait_s:
                    self._close(attempt, present)
            else:  # others may have given up before this worker does
                most = max((len(present), problem), most, key=lambda each: each[0])
                if now - complete_since_s > self._rules.wait_s:
                    raise QuorumError(most[1])
            time.sleep(POLL_S)

    def _problem(self, present: list[Member], expected: Iterable[Member]) -> str | None:
        """Return why the workers that are present may not continue; None if they may."""
        held = max((each.generation for each in present), default=0)
        confirmed = self._store.add("generation", 0)
        if held < confirmed:
            return (
                f"none of the {len(present)} workers here holds a snapshot of generation {confirmed}, the last one: "
                "the workers that do are gone. Start the run again from its folder, in a new store."
            )
        if held == confirmed > 0 and not any(each.in_memory for each in present if each.generation == held):
            living = self._living_holders(held)
            if living:
                return (
                    f"the {len(present)} workers here hold what was saved of generation {held}, and "
                    f"{', '.join(living)} may have committed more: alive, but not here within "
                    f"{self._rules.wait_s:g} s. Start this worker again when they have joined or ended."
                )
        needed = self._rules.expect if held == 0 else self._rules.least
        if len(present) < needed:
            here = {each.id for each in present}
            missing = ", ".join(repr(each.id) for each in expected if each.id not in here)
            return (
                f"{len(present)} of at least {needed} workers came within {self._rules.wait_s:g} s"
                f"{missing and f' (missing: {missing})'}, and fewer may not commit a step: another part of the "
                "workers might do the same. Start more workers, or join with a smaller least=."
            )
        return None

    def _living_holders(self, generation: int) -> list[str]:
        holders: dict[str, str] = json.loads(self._store.get(f"holders/{generation}"))
        self._monitor.watch(holders)
        return [f"worker {id!r}" for tag, id in holders.items() if self._monitor.alive(tag)]

    def _read_registered(self, attempt: int, registered: dict[int, Member]) -> None:
        for number in range(1, self._store.add(f"{attempt}/count", 0) + 1):
            key = f"{attempt}/member/{number}"
            if number not in registered and self._store.check([key]):
                registered[number] = Member.from_dict(json.loads(self._store.get(key)))
        self._monitor.watch(each.tag for each in registered.values())

    def _close(self, attempt: int, present: Iterable[Member]) -> None:
        """Write the membership, unless another worker has."""
        members = tuple({each.id: each for each in present}.values())  # one process for each id
        generation = 1 + max(self._store.add("top", 0), *(each.generation for each in members))
        text = json.dumps([generation, [asdict(each) for each in members]])
        self._store.compare_set(f"{attempt}/members", "", text)

    def _open_next(self, membership: Membership) -> None:
        """Open the next attempt. Generations grow, also after an attempt that failed."""
        self._raise_counter("top", membership.generation)
        self._raise_counter("attempt", membership.attempt + 1)
        self._monitor.watch_only(each.tag for each in membership.members)

    def _read_membership(self, attempt: int) -> Membership | None:
        found = None if attempt < 0 else self._store.read([f"{attempt}/members"])
        if found is None:
            return None
        generation, members = json.loads(found[0])
        return Membership(attempt, generation, tuple(map(Member.from_dict, members)))

    def _raise_counter(self, key: str, value: int) -> None:
        """Raise a counter in the store to at least `value`."""
        while (found := self._store.add(key, 0)) < value:
            self._store.compare_set(key, str(found), str(value))
