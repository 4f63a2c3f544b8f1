"""`laconic serve`: a store that workers and torchrun's agents find each other through."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch._C._distributed_c10d import TCPStore

from laconic import elastic
from laconic.cli.serve import MOST_FAILURES, while_answering

SERVE = ["-m", "laconic", "serve", "--port", "0"]
HANDSHAKE = b"\0" + (0x3C85F7CE).to_bytes(4, "little")  # how a client of torch's store begins
HALF_A_MESSAGE = HANDSHAKE + b"\1" + (100).to_bytes(8, "little")  # set a key of 100 bytes, which never come


@contextmanager
def serving(*arguments: str) -> Iterator[tuple["subprocess.Popen[str]", int]]:
    """Run a program that serves a store; the process and the port."""
    command = [sys.executable, "-u", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
        try:
            yield host, port_of(host)
        finally:
            host.kill()


def port_of(host: "subprocess.Popen[str]") -> int:
    assert host.stdout is not None
    said = re.fullmatch(r"the store of elastic runs listens on port (\d+) of this machine.*\n", host.stdout.readline())
    assert said is not None
    return int(said[1])


def test_it_serves_until_it_is_stopped():
    with serving(*SERVE) as (host, port):
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        host.send_signal(signal.SIGTERM)
        assert host.wait(30) == 128 + signal.SIGTERM


def test_mistakes(here):
    ended = here("serve", "--port", "70000")
    assert ended.code == 2 and "--port 70000: a port is between 1 and 65535" in ended.err
    ended = here("serve", "--port", "0", "--host", "192.0.2.1")
    assert ended.code == 2 and "--host 192.0.2.1 --port 0: the store cannot listen there (" in ended.err


def test_a_store_listens_on_its_address_alone():
    store = elastic.serve(0, "127.0.0.1")
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=5):
        pass


def test_it_starts_again_after_several_failures_in_a_row():
    results = iter([True, False, False, True, *[False] * MOST_FAILURES, True])
    while_answering(lambda: next(results), lambda _: None)
    assert list(results) == [True]


@pytest.mark.slow
def test_a_worker_can_join_after_a_flood_of_malformed_messages():
    sizes = [(2**n).to_bytes(8, "little") for n in (0, 13, 20, 31, 40, 63)]
    messages = [HALF_A_MESSAGE, os.urandom(64), b"GET / HTTP/1.0\r\n\r\n", HANDSHAKE[:3]]
    messages += [HANDSHAKE + bytes([query]) + size * 3 for query in range(16) for size in sizes]
    with serving(*SERVE, "--host", "127.0.0.1") as (_, port):
        left_open = []
        for index, message in enumerate(messages):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=30)
            stranger.sendall(message)
            left_open.append(stranger) if index % 2 else stranger.close()
        world = elastic.join(f"127.0.0.1:{port}", id=0)
        assert world.store.add("key", 1) == 1
        world.leave()
        for stranger in left_open:
            stranger.close()


@pytest.mark.slow
def test_a_store_that_does_not_answer_starts_again_on_its_port():
    """The other backend of torch hangs after half a message; in the second process, the store is as always."""
    program = (
        "from laconic import elastic; from laconic.cli import serve; from torch._C._distributed_c10d import TCPStore\n"
        "serve.CHECK_EVERY_S, serve.ANSWER_S = 0.5, 2.0\n"
        "def hangs(port, host): return TCPStore(host, port, None, True, wait_for_workers=False, use_libuv=False)\n"
        "elastic.serve = hangs\n"
        "serve.serve(0, '127.0.0.1')"
    )
    with serving("-c", program) as (host, port):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(HALF_A_MESSAGE)
            assert host.stdout is not None
            assert "the store has not answered 3 times: it starts again on port" in host.stdout.readline()
            assert port_of(host) == port
        elastic.join(f"127.0.0.1:{port}", id=0).leave()
