"""Who takes part: one meeting after the other, decided by the store.

A meeting is an attempt to form a group, numbered in the store. Whoever wants to take part takes a seat: those who have
lost a member, and those who want to come in. A seat says which committed rounds its worker holds, and of which
generation. When everybody has a seat who is expected and lives, the first to see it writes the list of members, once,
and the next meeting is open. So there is no leader, and nobody's death can hold a meeting up for long.

The list settles everything: the members, their order, the round that they go on from (the newest that all who were in
the last generation hold) and who hands it to those who were not. Who was killed, and read what it holds from a disk,
goes by those who were not: a disk lags behind. If all were, the newest that is on any disk counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from laconic.elastic.errors import QuorumError
from laconic.elastic.store import BoundedStore
from laconic.elastic.watch import Watch

POLL_S = 0.03


@dataclass(frozen=True)
class Seat:
    """A worker at a meeting: the generation whose rounds it holds (0 is none yet), after which steps, and where."""

    id: str
    tag: str
    generation: int
    steps: tuple[int, ...]
    in_memory: bool = True

    @property
    def order(self) -> tuple[int, int, str]:
        """Numbers by size, before names by letters."""
        return (0, int(self.id), "") if self.id.isdecimal() else (1, 0, self.id)


@dataclass(frozen=True)
class Members:
    """What a meeting has decided."""

    attempt: int
    generation: int
    seats: tuple[Seat, ...]

    @property
    def insiders(self) -> list[Seat]:
        """Those who hold the round to go on from, of the last generation."""
        return [seat for seat in self._last if self.base in seat.steps]

    @property
    def base(self) -> int:
        """The step to go on from: the newest that all of the last generation hold; on disks, any of them."""
        held = [set(seat.steps) for seat in self._last]
        common = set.intersection(*held) if self._last[0].in_memory else None
        return max(common or set.union(*held))

    @property
    def source(self) -> int:
        """The index of the one who hands its state to those who need it."""
        return self.seats.index(self.insiders[0])

    @property
    def _last(self) -> list[Seat]:
        newest = max((seat.generation, seat.in_memory) for seat in self.seats)
        return [seat for seat in self.seats if (seat.generation, seat.in_memory) == newest]

    def receives(self, worker: int) -> bool:
        """Tell whether a worker needs the state of another. At the very start, all but one do."""
        seat = self.seats[worker]
        fresh = all(each.generation == 0 for each in self.seats)
        return worker != self.source and (fresh or seat not in self.insiders)

    def to_text(self) -> str:
        """Write it for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str | bytes) -> Members:
        """Read what `to_text` wrote."""
        found = json.loads(text)
        seats = (Seat(**{**each, "steps": tuple(each["steps"])}) for each in found["seats"])
        return Members(found["attempt"], found["generation"], tuple(seats))


@dataclass(frozen=True)
class Rules:
    """When a meeting may close: `least` workers always, `expect` at the very start; nobody is waited for longer."""

    least: int
    expect: int
    wait_s: float


class Meetings:
    """The meetings of one run, as one worker sees them."""

    def __init__(self, store: BoundedStore, prefix: str, watch: Watch, rules: Rules) -> None:
        self._store, self._prefix, self._watch, self._rules = store, prefix, watch, rules

    def meet(self, seat: Seat, over: Callable[[], bool]) -> Members | None:
        """Take seats until a meeting has this worker among its members. None if the run is `over` meanwhile."""
        while True:
            attempt = self._store.add(self._key("attempt"), 0)
            self._watch.look_for_seats(None)
            members = self._attend(attempt, seat, over)
            if members is None or seat in members.seats:
                return members

    def confirmed(self, members: Members) -> None:
        """Note that all members of a generation hold its first round: older ones may not go on any more."""
        holders = {seat.tag: seat.id for seat in members.seats}
        self._store.set(self._key("holders", members.generation), json.dumps(holders))
        self._raise_to("generation", members.generation)

    def _attend(self, attempt: int, seat: Seat, over: Callable[[], bool]) -> Members | None:
        place = self._store.add(self._key(attempt, "count"), 1)
        self._store.set(self._key(attempt, f"seat/{place}"), json.dumps(asdict(seat)))
        before = self._list(attempt - 1)
        expected = () if before is None else before.seats
        self._watch.follow(each.tag for each in expected)
        seats: dict[int, Seat] = {}
        quiet_since = time.monotonic()
        begun = quiet_since
        while True:
            self._watch.raise_if_failed()
            if over():
                return None
            members = self._list(attempt)
            if members is not None:
                return self._adjourn(members)
            self._read_seats(attempt, seats)
            present = sorted((s for s in seats.values() if self._watch.alive(s.tag)), key=lambda s: s.order)
            seated = {s.tag for s in seats.values()}
            awaited = [s for s in expected if s.tag not in seated and self._watch.alive(s.tag)]
            if awaited:
                quiet_since = time.monotonic()
            patient = time.monotonic() - begun < self._rules.wait_s
            problem = self._problem(present, expected)
            if problem is None and not (awaited and patient):
                self._close(attempt, present)
            elif time.monotonic() - quiet_since > self._rules.wait_s:
                raise QuorumError(problem)
            time.sleep(POLL_S)

    def _problem(self, present: list[Seat], expected: Iterable[Seat]) -> str | None:
        """Say why those who are here may not go on, and who of the last list is missing."""
        held = max((seat.generation for seat in present), default=0)
        last = self._store.add(self._key("generation"), 0)
        if held < last:
            return (
                f"none of the {len(present)} workers here holds a round of generation {last}, the last that was "
                "formed: those who do are gone. Start the run again from its checkpoints, in a new store."
            )
        if held == last > 0 and not any(seat.in_memory for seat in present if seat.generation == held):
            living = self._living(held)
            if living:
                return (
                    f"the {len(present)} workers here hold what was saved of generation {held}, and "
                    f"{', '.join(living)} may have committed more: alive, but not here within "
                    f"{self._rules.wait_s:g} s. Start this worker again when they have come, or have ended."
                )
        needed = max(self._rules.expect, self._rules.least) if held == 0 else self._rules.least
        if len(present) < needed:
            here = {seat.id for seat in present}
            missing = ", ".join(repr(seat.id) for seat in expected if seat.id not in here)
            return (
                f"{len(present)} of at least {needed} workers came within {self._rules.wait_s:g} s"
                f"{missing and f' (missing: {missing})'}, and fewer may not commit a round: another part of the "
                "workers might do the same. Start more workers, or join with a smaller least=."
            )
        return None

    def _living(self, generation: int) -> list[str]:
        """Name the members of a confirmed generation that live, as far as one can tell yet."""
        holders: dict[str, str] = json.loads(self._store.get(self._key("holders", generation)))
        self._watch.follow(holders)
        return [f"worker {id!r}" for tag, id in holders.items() if self._watch.alive(tag)]

    def _read_seats(self, attempt: int, seats: dict[int, Seat]) -> None:
        for place in range(1, self._store.add(self._key(attempt, "count"), 0) + 1):
            key = self._key(attempt, f"seat/{place}")
            if place not in seats and self._store.check([key]):
                found = json.loads(self._store.get(key))
                seats[place] = Seat(**{**found, "steps": tuple(found["steps"])})
        self._watch.follow(seat.tag for seat in seats.values())

    def _close(self, attempt: int, present: Iterable[Seat]) -> None:
        newest = {seat.id: seat for seat in present}  # of two that have one id, one takes part
        seats = tuple(newest.values())
        generation = 1 + max(self._store.add(self._key("top"), 0), *(seat.generation for seat in seats))
        text = Members(attempt, generation, seats).to_text()
        self._store.compare_set(self._key(attempt, "members"), "", text)

    def _adjourn(self, members: Members) -> Members:
        """Let the next meeting be open. Generations grow, whatever became of earlier ones."""
        self._raise_to("top", members.generation)
        self._raise_to("attempt", members.attempt + 1)
        self._watch.follow_only(seat.tag for seat in members.seats)
        return members

    def _list(self, attempt: int) -> Members | None:
        key = self._key(attempt, "members")
        return Members.from_text(self._store.get(key)) if attempt >= 0 and self._store.check([key]) else None

    def _raise_to(self, name: str, value: int) -> None:
        key = self._key(name)
        found = self._store.add(key, 0)
        while found < value:
            self._store.compare_set(key, str(found), str(value))
            found = self._store.add(key, 0)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))
