"""Hosts behind a slow link: real namespaces with the given rates, removed afterwards."""

import json
import multiprocessing
import os
import shutil
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import pytest

from laconic.tools.compare.reporter import interface_bytes
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import PROGRAM, NoSlowLink, link, slow_link
from laconic.tools.launch.namespaces import Hosts, enter, token_bucket
from tests.namespaces import needs_root
from tests.tools.launch.processes import eventually, namespaces_alive, namespaces_held_by, running

_context = multiprocessing.get_context("forkserver")
SENT = 2_500_000
MOST_BPS = 20e6 * 1.04  # of a link of 20 Mbit/s: the bucket is full at first; a busy machine may be slower


def receive(hosts: Hosts, host: int, pipe: Connection) -> None:
    """Receive everything, and report the number of bytes and when the last one came."""
    enter(hosts, host)
    with socket.create_server((f"10.77.0.{host + 1}", 5000)) as server:
        pipe.send("ready")
        connection, _ = server.accept()
        with connection:
            count = 0
            while content := connection.recv(1 << 16):
                count += len(content)
            pipe.send((count, time.monotonic()))


def send(hosts: Hosts, host: int, to: int, pipe: Connection) -> None:
    enter(hosts, host)
    before, began = interface_bytes(), time.monotonic()
    assert before is not None
    with socket.create_connection((f"10.77.0.{to + 1}", 5000)) as connection:
        connection.sendall(bytes(SENT))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)  # until the receiver has read all of it
    after = interface_bytes()
    assert after is not None
    pipe.send((began, after - before, sorted(name for _, name in socket.if_nameindex())))


def transfer(hosts: Hosts, sender: int, receiver: int) -> tuple[float, int, list[str]]:
    """Send from one host to another; return bytes per second, the interface's count, and the sender's interfaces."""
    near, near_end = _context.Pipe()
    far, far_end = _context.Pipe()
    processes = [
        _context.Process(target=receive, args=(hosts, receiver, far_end)),
        _context.Process(target=send, args=(hosts, sender, receiver, near_end)),
    ]
    try:
        processes[0].start()
        assert far.poll(60) and far.recv() == "ready"
        processes[1].start()
        assert far.poll(60)
        count, ended = far.recv()
        assert count == SENT
        assert near.poll(60)
        began, counted, interfaces = near.recv()
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    return SENT / (ended - began), counted, interfaces


def test_a_bucket_holds_two_frames_or_two_milliseconds():
    assert token_bucket("eth0", 1e7) == "qdisc add dev eth0 root tbf rate 10000000bit burst 18000 limit 8018000"
    assert "burst 250000 " in token_bucket("eth0", 1e9)


class TestAsRoot:
    pytestmark = needs_root

    def test_a_link_has_its_rate_and_counts_its_bytes(self):
        with slow_link(link("20mbit", workers=2)) as slow:
            rate, counted, interfaces = transfer(slow.hosts, 0, 1)
            held = namespaces_held_by({slow.hosts.keeper})
            assert len(held) == 3  # two hosts and the switch
            assert slow.uplink_bytes() == {}
        assert 10e6 < rate * 8 < MOST_BPS
        assert counted == pytest.approx(SENT, rel=0.01)
        assert interfaces == ["control0", "eth0", "lo"]
        assert not running({slow.hosts.keeper})
        assert eventually(lambda: not namespaces_alive(held))

    def test_sites_are_joined_by_a_slower_link(self):
        with slow_link(link("2 @ 1gbit, 2 @ 20mbit")) as slow:
            near, _, _ = transfer(slow.hosts, 0, 1)
            assert max(slow.uplink_bytes().values()) < 0.01 * SENT
            far, _, _ = transfer(slow.hosts, 1, 2)
            uplinks = slow.uplink_bytes()
        assert near * 8 > 50e6
        assert 10e6 < far * 8 < MOST_BPS
        assert list(uplinks) == ["level 1, group 0", "level 1, group 1"]
        assert uplinks["level 1, group 0"] == pytest.approx(SENT, rel=0.01)
        assert uplinks["level 1, group 1"] < 0.01 * SENT

    def test_an_error_in_the_block_removes_the_hosts(self):
        made = slow_link(link("1gbit", workers=2))
        slow = made.__enter__()
        held = namespaces_held_by({slow.hosts.keeper})
        assert held
        assert not made.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
        assert not running({slow.hosts.keeper})
        assert not namespaces_alive(held)

    def test_hosts_are_removed_when_the_process_that_made_them_is_killed(self):
        keeper = subprocess.Popen(
            [sys.executable, "-I", str(PROGRAM), "keep", "2@1e9"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with keeper:
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            assert '"keeper"' in keeper.stdout.readline()
            held = namespaces_held_by({keeper.pid})
            keeper.stdin.close()  # as the kernel does when the process is killed
            assert keeper.wait(20) == 0
        assert held
        assert not namespaces_alive(held)

    @pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv to become nobody")
    def test_without_root_it_makes_a_user_namespace(self):
        """Run the program as nobody, with the system's Python, since that user may not be able to read ours."""
        python = shutil.which("python3", path="/usr/bin:/bin")
        if python is None:
            pytest.skip("needs a python3 in /usr/bin")
        nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "--bounding-set=-all"]
        command = [*nobody, python, "-c", PROGRAM.read_text(), "keep", "2@1e7"]
        done = subprocess.run(command, cwd="/", input="count\n", capture_output=True, text=True, timeout=60)
        if "error" in done.stdout:
            pytest.skip(f"this system has no user namespaces for everyone: {done.stdout.strip()}")
        made, counted = map(json.loads, done.stdout.splitlines())
        assert made["user"] is not None
        assert len(made["namespaces"]) == 2
        assert counted == {}
        assert not running({made["keeper"]})


def test_without_the_commands_there_is_no_link(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NoSlowLink, match="the command ip of iproute2 is not installed"), slow_link(link("1gbit")):
        pass


def test_the_error_of_the_system_is_the_reason(monkeypatch, tmp_path):
    broken = tmp_path / "ip"
    broken.write_text("#!/bin/sh\necho no network today >&2\nexit 1\n")
    broken.chmod(0o755)
    (tmp_path / "tc").symlink_to(broken)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(NoSlowLink, match="it needs root or user namespaces: "), slow_link(link("1gbit")):
        pass


def test_more_hosts_than_addresses():
    with pytest.raises(UsageError, match=r"--link 1gbit: 300 hosts. There are addresses for 250: use fewer."):
        slow_link(link("1gbit", workers=300)).__enter__()
