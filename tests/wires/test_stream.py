"""Streams: workers find each other and nobody else, say and hear any amount, and are told when a neighbour is gone."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from laconic.averaging import average_in_place, pieces_of
from laconic.ledger import Ledger
from laconic.wires import correspondence, ring, star, stream
from laconic.wires.correspondence import Correspondents
from laconic.wires.group import Conductor
from laconic.wires.letters import Letters, Mail
from laconic.wires.stream import Stream, meet, memory_of
from tests.workers import run_workers

LARGE = 300_000
"""Elements: more than one megabyte, so that it is not copied."""


def _mail(limit_s: float = 30) -> Mail:
    return Mail(Letters(dist.group.WORLD), timedelta(seconds=limit_s))  # type: ignore[arg-type]


def _met() -> Stream:
    found = meet(_mail())
    assert found is not None
    return found


def _numbers(worker: int) -> list[Tensor]:
    """As much as no socket takes at once, in pieces of any size."""
    lots = torch.Generator().manual_seed(worker)
    return [torch.randn(size, generator=lots) for size in (1, 5_000_000, 3, 70_001, 1, 3_000_000)]


def _said_before_heard(worker: int) -> bool:
    """All say all that they have before any of them listens."""
    talk, gone = _met(), []
    for crowded in (False, True):
        talk.crowded = crowded
        heard = [torch.empty_like(t) for t in _numbers(worker)]
        with talk.talk(20):
            for number, t in enumerate(_numbers(worker)):
                talk.say([memory_of(t)], then=lambda number=number: gone.append(number))  # type: ignore[misc]
            dist.barrier()
            for t in heard:
                talk.hear(memory_of(t))
        assert all(map(torch.equal, heard, _numbers((worker - 1) % dist.get_world_size())))
    return gone == [*range(6), *range(6)] and not talk.stopped and not talk.far


@pytest.mark.parametrize("workers", [2, 3])
def test_all_may_speak_before_anyone_listens(workers: int):
    assert all(run_workers(_said_before_heard, workers))


def _averages(conductor: Conductor, worker: int) -> list[float]:
    x = torch.full((LARGE,), float(worker))
    average_in_place(conductor, {"x": x})
    return [float(value) for value in x.unique()]


def _ways(worker: int, prepare: Callable[[int], None], between: Callable[[Conductor, int], None]) -> Any:
    """Average twice, and tell which way it went and how often workers met."""
    correspondence.ROUND, stream.MEET_S = 0, 2.0
    met: list[None] = []
    gone: list[str] = []

    def watch(where: Any, name: str, seen: Callable[[], None]) -> None:
        plain = getattr(where, name)

        def watched(*args: Any) -> Any:
            seen()
            return plain(*args)

        setattr(where, name, watched)

    watch(correspondence, "meet", lambda: met.append(None))
    watch(ring.Ring, "deliver", lambda: gone.append("ring"))
    watch(star.Star, "deliver", lambda: gone.append("star"))
    prepare(worker)
    conductor = Conductor(dist.group.WORLD, Ledger(), share=True)
    first = _averages(conductor, worker)
    between(conductor, worker)
    return first, _averages(conductor, worker), gone, len(met)


def _nothing(*_: Any) -> None:
    pass


def _has_no_such_interface(worker: int) -> None:
    if worker == 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "none7"


def _wants_another_transport(worker: int) -> None:
    if worker == 0:
        os.environ["GLOO_DEVICE_TRANSPORT"] = "TCP_TLS"


def _is_told_a_door_where_nobody_is(worker: int) -> None:
    tell = stream._tell

    def told(*args: Any) -> Any:
        door = tell(*args)
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            return door if worker == 1 else stream._Door("127.0.0.1", closed.getsockname()[1], secret="00" * 32)

    vars(stream)["_tell"] = told


def _is_told_another_door(worker: int) -> None:
    """Of one who lets everybody in, and does not know the secret."""
    tell = stream._tell
    elsewhere = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        guest, _ = elsewhere.accept()
        guest.sendall(bytes(16))
        time.sleep(5)

    threading.Thread(target=serve, daemon=True).start()

    def told(*args: Any) -> Any:
        door = tell(*args)
        assert door is not None
        return door if worker == 1 else stream._Door("127.0.0.1", elsewhere.getsockname()[1], door.secret)

    vars(stream)["_tell"] = told


@pytest.mark.parametrize(
    "prepare",
    [_has_no_such_interface, _wants_another_transport, _is_told_a_door_where_nobody_is, _is_told_another_door],
)
def test_where_one_cannot_be_reached_all_go_by_letter(prepare: Callable[[int], None]):
    for first, second, gone, met in run_workers(_ways, 2, (prepare, _nothing)):
        assert first == second == [0.5]
        assert gone == ["star", "star"] and met == 1, "it is not tried again"


def _breaks_off(conductor: Conductor, worker: int) -> None:
    if worker == 0:
        conductor._letters._stream.stop()  # type: ignore[union-attr]


def _closes(conductor: Conductor, worker: int) -> None:
    conductor.close()


@pytest.mark.parametrize(("between", "meetings"), [(_nothing, 1), (_breaks_off, 2), (_closes, 2)])
def test_who_has_parted_meets_again(between: Callable[[Conductor, int], None], meetings: int):
    for first, second, gone, met in run_workers(_ways, 2, (_nothing, between)):
        assert first == second == [0.5]
        assert gone == ["ring", "ring"] and met == meetings


def _knocked_at(worker: int, says: bytes) -> bool:
    """A stranger is there first."""
    listener, strangers = stream._listener, []

    def with_a_stranger() -> socket.socket | None:
        found = listener()
        assert found is not None
        strangers.append(socket.create_connection(found.getsockname()))
        strangers[-1].sendall(says)
        return found

    stream._listener, stream.GREET_S = with_a_stranger, 0.2
    assert _said_before_heard(worker)
    with contextlib.suppress(ConnectionResetError):
        return strangers[0].recv(1) == b""
    return True


@pytest.mark.parametrize("says", [b"", b"GET / HTTP/1.1\r\n", bytes(64)], ids=["nothing", "a word", "much"])
def test_strangers_are_not_let_in(says: bytes):
    assert all(run_workers(_knocked_at, 2, (says,)))


def _left_alone(worker: int, how: str, crowded: bool) -> tuple[str, float]:
    """Worker 1 closes its stream, stands still, or is stopped by someone else while it waits."""
    talk, said, begun = _met(), "", 0.0
    talk.crowded = crowded
    if worker == 1 and how == "closes":
        talk.stop()
    if worker == 0:
        begun = time.monotonic()
        if how == "is stopped":
            threading.Timer(0.3, talk.stop).start()
        try:
            with talk.talk(0.5 if how == "stands still" else 60):
                talk.say([memory_of(torch.zeros(20_000_000))])
                talk.hear(memory_of(torch.zeros(9)))
        except RuntimeError as error:
            said = str(error)
        assert talk.stopped
        begun = time.monotonic() - begun
    dist.barrier()
    return said, begun


@pytest.mark.parametrize(
    ("how", "right"), [("closes", "was lost"), ("stands still", "silent for 0.5 s"), ("is stopped", "was lost")]
)
@pytest.mark.parametrize("crowded", [False, True])
def test_a_neighbour_that_is_gone(how: str, right: str, crowded: bool):
    (said, seconds), _ = run_workers(_left_alone, 2, (how, crowded))
    assert right in said, said
    assert seconds < 20, "it was told, and did not wait for its limit"


def _error_of_its_own(worker: int) -> tuple[str, bool]:
    talk = _met()
    try:
        with talk.talk(20):
            talk.say([memory_of(torch.zeros(20_000_000))])
            raise ValueError("mine")
    except ValueError as error:
        return str(error), talk.stopped
    raise AssertionError


def test_errors_of_those_who_talk_are_theirs():
    assert run_workers(_error_of_its_own, 2) == [("mine", True)] * 2


def _given_up(worker: int) -> tuple[str, bool]:
    """One worker gives up half-way, while it writes over its tensors as they lie; the other goes on then."""
    correspondence.ROUND, ring.SHARE = 0, 100_000
    x, said = torch.full((10 * LARGE,), float(worker)), ""
    before = x.clone()
    ours, hear, heard, go_on = Correspondents(dist.group.WORLD), Stream.hear, [], threading.Event()  # type: ignore[arg-type]

    def with_a_pause(self: Stream, memory: memoryview) -> None:
        heard.append(memory)
        if len(heard) == 20:
            assert worker == 0 or go_on.wait(30)
        hear(self, memory)

    Stream.hear = with_a_pause  # type: ignore[method-assign]
    on_its_way = ours.average(list(pieces_of({"x": x}, 1 << 20)), limit_s=20)
    while len(heard) < 20:
        time.sleep(0.01)
    if worker == 0:
        ours.give_up()
        then = x.clone()
        dist.barrier()
        time.sleep(0.5)
        try:
            on_its_way.wait()
        except RuntimeError as error:
            said = str(error)
        return said, torch.equal(x, then) and not torch.equal(x, before)
    dist.barrier()
    go_on.set()
    try:
        on_its_way.wait()
    except RuntimeError as error:
        said = str(error)
    return said, True


def test_what_was_given_up_is_not_changed_any_more():
    (said, same), (others, _) = run_workers(_given_up, 2)
    assert said == "the letters were given up" and same
    assert "was lost" in others
