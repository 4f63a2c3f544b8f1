"""What is logged when the members of a run change: who is gone, who is new or back, and who goes on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

logger = logging.getLogger("laconic.elastic")


class MembersLog:
    """Logs the members of each group that this worker is in, as a warning if they have changed."""

    def __init__(self) -> None:
        self._members: Sequence[str] = ()
        self._known: set[str] = set()

    def log(self, members: Sequence[str], step: int) -> None:
        """Log the members of a new group that continues after a step."""
        change = describe_change(self._members, members, self._known, step) if self._members else ""
        logger.log(logging.WARNING if change else logging.INFO, "%s", change or _go_on(members, step))
        self._members = members
        self._known.update(members)


def describe_change(before: Sequence[str], after: Sequence[str], known: Collection[str], step: int) -> str:
    """Return who is gone, who has come and who goes on; "" if no member has changed. `known` were members before.

    >>> describe_change(["0", "1", "2"], ["0", "2"], {"0", "1", "2"}, step=40)
    'worker 1 is gone; workers 0, 2 go on after step 40, 2 in all.'
    >>> describe_change(["0", "2"], ["0", "1", "2", "3"], {"0", "1", "2"}, step=60)
    'worker 1 is back; worker 3 has joined; workers 0, 1, 2, 3 go on after step 60, 4 in all.'
    """
    gone = [id for id in before if id not in after]
    back = [id for id in after if id not in before and id in known]
    new = [id for id in after if id not in before and id not in known]
    parts = [(gone, "is gone", "are gone"), (back, "is back", "are back"), (new, "has joined", "have joined")]
    said = [f"{_named(ids)} {several if len(ids) > 1 else one}" for ids, one, several in parts if ids]
    return "; ".join([*said, _go_on(after, step)]) if said else ""


def _go_on(ids: Sequence[str], step: int) -> str:
    return f"{_named(ids)} {'go' if len(ids) > 1 else 'goes'} on after step {step}, {len(ids)} in all."


def _named(ids: Sequence[str]) -> str:
    return f"worker{'s' * (len(ids) > 1)} {', '.join(ids)}"
