"""Connections of our own, around a ring of workers: bytes go to the next one in the order in which they are said.

gloo asks before each letter whether it is expected, and hands it to a thread that looks at all connections. Where both
sides know what comes, no word is needed but the bytes themselves: one thread says them, another hears them.

Workers tell each other over gloo where they can be reached, at the address that gloo takes, and a secret, so that no
one else is taken for a neighbour.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from laconic.addresses import family_of, gloos_address
from laconic.wires import letters
from laconic.wires.letters import Mail
from laconic.wires.patience import aside

MEET_S = 5.0
"""How long workers try to reach each other before they do without."""

GREET_S = 2.0
"""How long a guest may take to say the secret, of which it knows before it knocks."""

_SECRET = 16
"""Bytes that a worker expects of the one before it, and as many with which it answers."""

_CARD = 512
"""Bytes that tell where a worker can be reached."""

_Said: TypeAlias = tuple[Sequence[memoryview], Callable[[], None] | None]


class Stream:
    """What this worker says to the one after it, and hears from the one before it."""

    def __init__(self, before: socket.socket, after: socket.socket) -> None:
        self._before, self._after = before, after
        self.far = False
        """Whether some of the workers are on another machine."""
        self.crowded = False
        """Whether there are too few cores for two threads of each worker, if they are all on this machine."""
        self._to_say: queue.SimpleQueue[_Said | None] = queue.SimpleQueue()
        self.talking = self._stopping = False
        self._silenced: OSError | None = None
        self._handed_over = self._gone = 0  # to the thread that speaks, and by it
        self._stop = weakref.finalize(self, _close, os.getpid(), before, after)
        for each in (before, after):
            each.settimeout(None)
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def stopped(self) -> bool:
        """Whether nothing can be said any more."""
        return not self._stop.alive

    def stop(self) -> None:
        """End it; whoever waits in it is told so by an error."""
        self._stopping = True
        if self.talking:  # whose threads close it: until then its number must not become that of another file
            _shut_down(self._before, self._after)
        else:
            self._stop()

    @contextlib.contextmanager
    def talk(self, limit_s: float) -> Iterator[None]:
        """Say and hear, and end when all has been said. An error ends the stream: what is on its way has no reader."""
        limit = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        speaker = aside(self._speak)
        self.talking = True
        try:
            for each in (self._before, self._after):
                for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    each.setsockopt(socket.SOL_SOCKET, way, limit)
            yield
            self._to_say.put(None)
            speaker.result()
        except BaseException as error:
            first = self._silenced or error
            self.stop()
            self._to_say.put(None)
            speaker.exception()  # when it has ended
            if not isinstance(error, OSError):
                raise
            raise RuntimeError(_why(first, limit_s)) from error
        finally:
            self.talking = False
            if self._stopping:
                self._stop()

    def say(self, memory: Sequence[memoryview], then: Callable[[], None] | None = None) -> None:
        """Begin to send, after all that was said before; when it has gone, do what comes then."""
        if self.crowded and self._handed_over == self._gone:
            memory = self._say_now(memory)
        if memory:
            self._handed_over += 1
            self._to_say.put((memory, then))
        elif then is not None:
            then()

    def _say_now(self, memory: Sequence[memoryview]) -> Sequence[memoryview]:
        """Send what can go without waiting, from the core in whose cache it is, and wake nobody; return the rest."""
        for at, each in enumerate(memory):
            gone = 0
            with contextlib.suppress(BlockingIOError):
                gone = self._after.send(each, socket.MSG_DONTWAIT)
            if gone < each.nbytes:
                return [each.cast("B")[gone:], *memory[at + 1 :]]
        return []

    def hear(self, memory: memoryview) -> None:
        """Wait until so many bytes have come."""
        while memory.nbytes:
            if self._stopping:  # though more may have come already
                raise ConnectionAbortedError("it was stopped")
            come = self._before.recv_into(memory, 0, socket.MSG_WAITALL)
            if come == 0:
                raise ConnectionResetError("the connection was closed")
            memory = memory.cast("B")[come:]

    def _speak(self) -> None:
        try:
            while (said := self._to_say.get()) is not None:
                memory, then = said
                for each in memory:
                    self._after.sendall(each)
                if then is not None:
                    then()
                self._gone += 1
        except OSError as error:
            self._silenced = error
            _shut_down(self._before, self._after)  # for whoever hears
            raise


def memory_of(x: Tensor) -> memoryview:
    """See the memory of a flat tensor on the CPU, in its elements."""
    return memoryview(x.detach().numpy())  # type: ignore[arg-type]


def meet(mail: Mail) -> Stream | None:
    """Connect this worker with its neighbours, as all workers do now; None, everywhere, if one of them cannot."""
    stream = None
    with contextlib.ExitStack() as until_then:
        listener = _listener()
        secret = secrets.token_bytes(2 * _SECRET)
        if listener is not None:
            until_then.enter_context(listener)
        after = _tell(mail, listener, secret)
        if listener is not None and after is not None:
            with contextlib.suppress(OSError):
                stream = _connect(listener, secret, after)
        elsewhere = listener is None or after is None or after.host != listener.getsockname()[0]
    lost, far, few = mail.any_says(stream is None, elsewhere, _cores() < 2 * mail.workers)
    if stream is None:
        return None
    if lost:
        stream.stop()
        return None
    stream.far, stream.crowded = far, few and not far
    return stream


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Door:
    """Where a worker can be reached."""

    host: str
    port: int
    secret: str


def _listener() -> socket.socket | None:
    """Listen where gloo does, unless users want gloo to talk in another way than plain TCP."""
    if os.name != "posix" or os.environ.get("GLOO_DEVICE_TRANSPORT", "TCP").upper() != "TCP":
        return None
    address = gloos_address(os.environ)
    if address is None:
        return None
    try:
        return socket.create_server((address, 0), family=family_of(address))
    except OSError:
        return None


def _tell(mail: Mail, listener: socket.socket | None, secret: bytes) -> _Door | None:
    """Tell the worker before where this one can be reached, and hear it from the one after."""
    mine, theirs = torch.zeros(_CARD, dtype=torch.uint8), torch.zeros(_CARD, dtype=torch.uint8)
    if listener is not None:
        host, port = listener.getsockname()[:2]
        text = json.dumps({"host": host, "port": port, "secret": secret.hex()}).encode()
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    heard = mail.receive([theirs], (mail.me + 1) % mail.workers, letters.SAYS)
    mail.wait([*heard, *mail.send([mine], (mail.me - 1) % mail.workers, letters.SAYS)])
    said = bytes(theirs.numpy()).rstrip(b"\0")
    return _Door(**json.loads(said)) if said else None


def _connect(listener: socket.socket, secret: bytes, door: _Door) -> Stream:
    """Knock at the door of the worker after, let in the one before, and hear from both that they are who they are."""
    until = time.monotonic() + MEET_S
    theirs = bytes.fromhex(door.secret)
    with contextlib.ExitStack() as in_vain:
        after = in_vain.enter_context(socket.create_connection((door.host, door.port), timeout=MEET_S))
        after.sendall(theirs[:_SECRET])
        before = in_vain.enter_context(_let_in(listener, secret, until))
        if not secrets.compare_digest(_some(after, _SECRET, until), theirs[_SECRET:]):
            raise ConnectionRefusedError(f"{door.host} port {door.port} is not the worker after this one")
        stream = Stream(before, after)
        in_vain.pop_all()
    return stream


def _let_in(listener: socket.socket, secret: bytes, until: float) -> socket.socket:
    """Let in who knows the secret, and nobody else."""
    while True:
        listener.settimeout(_left(until))
        guest, _ = listener.accept()
        with contextlib.suppress(OSError):
            if secrets.compare_digest(_some(guest, _SECRET, time.monotonic() + GREET_S), secret[:_SECRET]):
                guest.sendall(secret[_SECRET:])
                return guest
        guest.close()


def _some(source: socket.socket, size: int, until: float) -> bytes:
    """Hear so many bytes."""
    said = b""
    while len(said) < size:
        source.settimeout(_left(until))
        more = source.recv(size - len(said))
        if not more:
            raise ConnectionResetError("the connection was closed")
        said += more
    return said


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _shut_down(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _close(whose: int, *sockets: socket.socket) -> None:
    if os.getpid() == whose:  # and not a child that was forked
        _shut_down(*sockets)
    for each in sockets:
        each.close()


def _why(error: BaseException, limit_s: float) -> str:
    if isinstance(error, BlockingIOError):
        return f"a neighbour in the ring was silent for {limit_s:g} s"
    return f"a neighbour in the ring was lost: {getattr(error, 'strerror', None) or error}"
