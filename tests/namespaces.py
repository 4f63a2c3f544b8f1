"""Several hosts on one machine: network namespaces joined by a bridge. For tests that run as root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from laconic.tools.launch.namespaces import CLONE_NEWNET, _call

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and iproute2 for network namespaces"
    ),
]


def ip(*words: str) -> str:
    """Run the `ip` command."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Network:
    """Hosts that are there, by name and address, and the switches between them, whose cables can be pulled."""

    hosts: list[tuple[str, str]]
    switch: str

    def unplug(self, host: int) -> None:
        """Pull the cable of one host."""
        ip("-n", self.switch, "link", "set", f"p{host}", "down")

    def plug_in(self, host: int) -> None:
        """Put it back."""
        ip("-n", self.switch, "link", "set", f"p{host}", "up")

    def part(self) -> None:
        """Pull the cable between the sites."""
        ip("-n", self.switch, "link", "set", "up1", "down")

    def join(self) -> None:
        """Put it back."""
        ip("-n", self.switch, "link", "set", "up1", "up")

    def deafen(self, host: int) -> None:
        """Let nothing more come to a host, which can still be heard."""
        drop_all(self.switch, f"p{host}")

    def mute(self, host: int) -> None:
        """Let nothing more go out of a host, which can still hear."""
        drop_all(self.hosts[host][0], "eth0")

    def mend(self, host: int) -> None:
        """Undo what was done to one direction."""
        for namespace, card in ((self.switch, f"p{host}"), (self.hosts[host][0], "eth0")):
            subprocess.run(
                ["tc", "-n", namespace, "qdisc", "del", "dev", card, "root"], capture_output=True, timeout=20
            )


def drop_all(namespace: str, card: str) -> None:
    """Drop what a card sends: a token bucket that is too small for any packet."""
    words = f"tc -n {namespace} qdisc add dev {card} root tbf rate 1kbit burst 1 limit 1"
    subprocess.run(words.split(), check=True, capture_output=True, timeout=20)


@contextmanager
def hosts(count: int) -> Iterator[list[tuple[str, str]]]:
    """Make `count` hosts on one switch; yield their names and addresses; remove them whatever happens."""
    with sites(count) as network:
        yield network.hosts


@contextmanager
def sites(*sizes: int) -> Iterator[Network]:
    """Make sites of so many hosts each, one switch a site, joined by cables; remove them whatever happens."""
    tag = f"lt{os.getpid() % 100_000}"
    site_of = [site for site, size in enumerate(sizes) for _ in range(size)]
    with ExitStack() as undo:
        for name in [f"{tag}s", *(f"{tag}h{index}" for index in range(len(site_of)))]:
            ip("netns", "add", name)
            undo.callback(ip, "netns", "del", name)
        switch = f"{tag}s"
        for site in range(len(sizes)):
            ip("-n", switch, "link", "add", "name", f"bridge{site}", "type", "bridge")
            ip("-n", switch, "link", "set", f"bridge{site}", "up")
            if site:
                ip("-n", switch, "link", "add", "name", f"up{site}", "type", "veth", "peer", "name", f"down{site}")
                ip("-n", switch, "link", "set", f"up{site}", "master", f"bridge{site}", "up")
                ip("-n", switch, "link", "set", f"down{site}", "master", "bridge0", "up")
        made = []
        for index, site in enumerate(site_of):
            host, address = f"{tag}h{index}", f"10.77.0.{index + 1}"
            ip("-n", host, "link", "add", "name", "eth0", "type", "veth", "peer", "name", f"p{index}", "netns", switch)
            ip("-n", switch, "link", "set", f"p{index}", "master", f"bridge{site}", "up")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "up")
            ip("-n", host, "link", "set", "lo", "up")
            made.append((host, address))
        yield Network(made, switch)


def move_to(host: str) -> None:
    """Move this process to a host. Call it before anything opens a socket or starts a thread."""
    namespace = os.open(f"/var/run/netns/{host}", os.O_RDONLY | os.O_CLOEXEC)
    _call("setns", namespace, CLONE_NEWNET)
    os.close(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def run_on_hosts(count: int, code: str, *arguments: str, timeout_s: float = 120) -> list[str]:
    """Run Python code on each of so many hosts, with torchrun's variables, and return what each has printed.

    "{rank}", "{workers}" and "{leader}", the address of the first host, are filled in in the arguments.
    """
    with hosts(count) as made:
        leader = made[0][1]
        processes = []
        for rank, (name, _) in enumerate(made):
            variables = {
                "RANK": rank,
                "LOCAL_RANK": 0,
                "WORLD_SIZE": count,
                "MASTER_ADDR": leader,
                "MASTER_PORT": 29500,
            }
            variables |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": 1}
            given = [each.format(rank=rank, workers=count, leader=leader) for each in arguments]
            environment = [f"{key}={value}" for key, value in variables.items()]
            command = ["ip", "netns", "exec", name, "env", *environment, sys.executable, "-W", "ignore", "-c", code]
            pipe = subprocess.PIPE
            processes.append(subprocess.Popen([*command, *given], stdout=pipe, stderr=pipe, text=True))
        try:
            outputs = [process.communicate(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for out, err in outputs:
        assert out, err[-3000:]
    return [out for out, _ in outputs]
