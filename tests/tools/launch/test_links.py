"""Links: parsing, the time and the headers of a collective; hosts behind real links, removed afterwards."""

from __future__ import annotations

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
from laconic.tools.doctor.diagnosis import measure_link
from laconic.tools.errors import UsageError
from laconic.tools.launch.links import PROGRAM, Level, Link, NoSlowLink, framing_bytes, link, slow_link
from laconic.tools.launch.namespaces import Hosts, enter, token_bucket
from laconic.tools.planner.network import collective_s
from laconic.tools.units import rate_text
from tests.namespaces import needs_root
from tests.tools.launch.processes import eventually, namespaces_alive, namespaces_held_by, running
from tests.workers import run_workers


@pytest.mark.parametrize(
    ("text", "rate_bps"),
    [
        ("100mbit", 1e8),
        ("1.5gbit", 1.5e9),
        ("50Mb/s", 5e7),
        ("300GB/s", 2.4e12),
        ("8kbit", 8e3),
        ("10 Mbit/s", 1e7),
        ("1Gbps", 1e9),
    ],
)
def test_rates(text, rate_bps):
    assert link(text, workers=3) == Link((Level(3, rate_bps),))


def test_levels_are_innermost_first_and_read_back():
    slow = link("2 @ 1gbit, 3 @ 50mbit")
    assert slow.levels == (Level(2, 1e9), Level(3, 5e7))
    assert slow.workers == 6
    assert link(str(slow)) == slow
    assert str(link("100mbit", workers=4)) == "100mbit"


def test_a_level_of_one_is_never_crossed():
    assert link("1 @ 1mbit, 2 @ 1gbit").slowest_bps == 1e9
    assert link("4 @ 1gbit, 1 @ 1mbit").slowest_bps == 1e9


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fast", r"--link fast: write a rate of at least 1kbit: .* such as 100mbit"),
        ("10", "--link 10: write a rate"),
        ("0mbit", "--link 0mbit: write a rate"),
        ("-5mbit", "--link -5mbit: write a rate"),
        ("", "--link : write a rate"),
        ("2 @ 1gbit, 50mbit", "--link 50mbit: write a number of at least 1, an @, and a rate"),
        ("0 @ 1gbit", "--link 0 @ 1gbit: write a number of at least 1"),
        ("two @ 1gbit", "--link two @ 1gbit: write a number of at least 1"),
    ],
)
def test_errors_quote_what_was_written(text, words):
    with pytest.raises(UsageError, match=words):
        link(text, workers=2)


def test_levels_must_hold_the_workers():
    with pytest.raises(UsageError, match=r"these levels hold 2 x 2 = 4 workers, and 8 were asked for"):
        link("2 @ 1gbit, 2 @ 50mbit", workers=8)


def test_seconds_of_a_ring():
    slow = link("8mbit", workers=4)  # a megabyte a second
    assert collective_s("all_reduce", 1_000_000, 4, slow) == pytest.approx(1.5)
    assert collective_s("all_gather", 1_000_000, 4, slow) == pytest.approx(3.0)
    assert collective_s("all_reduce", 0, 4, slow, latency_s=0.01) == pytest.approx(0.06)
    assert collective_s("all_reduce", 1_000_000, 1, slow) == 0.0


def test_the_slowest_level_decides():
    sites = link("2 @ 1gbit, 2 @ 8mbit")
    assert collective_s("all_reduce", 1_000_000, 4, sites) == pytest.approx(1.5)


def test_framing_grows_with_messages_and_not_with_bytes():
    assert framing_bytes("all_reduce", 10_000, 4) == framing_bytes("all_reduce", 4_000_000, 4)
    assert framing_bytes("all_reduce", 32 << 20, 4) == 4 * framing_bytes("all_reduce", 10_000, 4)
    assert framing_bytes("all_gather", 10_000, 1) == 0


def test_rates_as_text():
    assert [rate_text(rate) for rate in (1e3, 2.5e9, 500)] == ["1kbit", "2.5gbit", "500bit"]


def _measure(worker: int) -> tuple[float, float]:
    return measure_link(worker, 3)


def test_measured_links_between_real_workers():
    links = run_workers(_measure, 3)
    assert len(links) == 3
    assert all(bits_per_s > 0 and round_trip_s > 0 for round_trip_s, bits_per_s in links)


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
