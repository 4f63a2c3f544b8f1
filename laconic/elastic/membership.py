"""The result of a rendezvous: which workers form the next group, and the step that they continue from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any


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

    def to_json(self) -> str:
        """Return it as text, for the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Membership:
        """Read what `to_json` wrote."""
        found = json.loads(text)
        return Membership(found["attempt"], found["generation"], tuple(map(Member.from_dict, found["members"])))
