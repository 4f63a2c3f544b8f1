"""Handing state over: the members of a new generation come to the round that they go on from."""

from __future__ import annotations

import torch.distributed as dist

from laconic.elastic.group import CallOff, broadcaster, subgroup
from laconic.elastic.history import History
from laconic.elastic.members import Members
from laconic.elastic.snapshot import Snapshot, receive, send


def hand_over(
    members: Members, worker: int, history: History, group: dist.ProcessGroup, timeout_s: float, call_off: CallOff
) -> Snapshot:
    """Take the round that the members go on from: one's own, or that of another; and give it to those who need it."""
    receivers = [each for each in range(len(members.seats)) if members.receives(each)]
    own = None if worker in receivers else history.at(members.base)
    if not receivers or worker not in (members.source, *receivers):
        assert own is not None
        return own
    among = sorted([members.source, *receivers])
    broadcast = broadcaster(subgroup(group, among, timeout_s), among.index(members.source), call_off)
    if own is None:
        return Snapshot(members.base, receive(broadcast))
    send(own.parts, broadcast)
    return own
