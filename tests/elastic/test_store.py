"""`python -m laconic.elastic`: a store that workers and torchrun's agents find each other through."""

from __future__ import annotations

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

HOST = [sys.executable, "-m", "laconic.elastic"]
HANDSHAKE = b"\0" + (0x3C85F7CE).to_bytes(4, "little")  # how a client of torch's store begins
HALF_A_MESSAGE = HANDSHAKE + b"\1" + (100).to_bytes(8, "little")  # set a key of 100 bytes, which never come


@contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run the program; the process and its port."""
    command = [*HOST, "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            line = host.stdout.readline()
            found = re.fullmatch(r"the store of elastic runs listens on port (\d+) of this machine.*\n", line)
            assert found is not None, line
            yield host, int(found[1])
        finally:
            host.kill()


def test_it_serves_until_it_is_stopped():
    with serving() as (host, port):
        store = TCPStore("127.0.0.1", port, is_master=False)
        store.set("key", "value")
        assert store.get("key") == b"value"
        host.send_signal(signal.SIGTERM)
        assert host.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--port", "70000"], r"--port 70000: the store cannot listen there \(.*\)\. Choose another port from 1 to"),
        (["--port", "0", "--host", "192.0.2.1"], r"--host 192.0.2.1 --port 0: the store cannot listen there \("),
    ],
)
def test_mistakes(options, text):
    ended = subprocess.run([*HOST, *options], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and re.search(text, ended.stderr) and "Traceback" not in ended.stderr


def test_a_store_listens_on_its_address_alone():
    store = elastic.serve(0, "127.0.0.1")
    with socket.create_connection(("127.0.0.1", store.port), timeout=5):
        pass
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", store.port), timeout=5):
        pass


@pytest.mark.slow
def test_a_worker_can_join_after_a_flood_of_malformed_messages():
    sizes = [(2**n).to_bytes(8, "little") for n in (0, 13, 20, 31, 40, 63)]
    messages = [HALF_A_MESSAGE, os.urandom(64), b"GET / HTTP/1.0\r\n\r\n", HANDSHAKE[:3]]
    messages += [HANDSHAKE + bytes([query]) + size * 3 for query in range(16) for size in sizes]
    with serving("--host", "127.0.0.1") as (_, port):
        left_open = []
        for index, message in enumerate(messages):
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
            client.sendall(message)
            left_open.append(client) if index % 2 else client.close()
        world = elastic.join(f"127.0.0.1:{port}", id=0)
        assert world.store.add("key", 1) == 1
        world.leave()
        for client in left_open:
            client.close()
