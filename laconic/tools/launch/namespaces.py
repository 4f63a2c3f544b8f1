"""Hosts on one machine: Linux network namespaces that the kernel removes by itself.

A keeper process makes the namespaces and holds them open; they have no names and no files. When the keeper and the
workers in them have ended, the kernel removes them. The keeper ends when the pipe from the process that started it
closes, which also happens if that process is killed.

Each host has two network interfaces: `eth0`, the link under study, and `control0`, over which workers find each other
and agree to stop. So the counters of `eth0` have the training traffic alone. Neither leads outside. Token buckets
(`tc tbf`) limit the rates in both directions: at each host's interface, and between sites.

Root can make namespaces. For other users, the keeper first makes a user namespace, if the kernel allows it.

This file imports the standard library alone and is also a program: `python namespaces.py keep 2@1e9 2@5e7` is the
keeper, and `python namespaces.py enter HOSTS python train.py` runs a command on a host.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from math import prod

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
LINK_INTERFACE, CONTROL_INTERFACE = "eth0", "control0"
INTERFACE_VARIABLE, CONTROL_INTERFACE_VARIABLE = "LACONIC_INTERFACE", "LACONIC_CONTROL_INTERFACE"
FRAME_BYTES = 9000  # jumbo frames: the headers and acknowledgements of TCP are then about 1% of the bytes
MOST_HOSTS = 250  # one address each


@dataclass(frozen=True)
class Hosts:
    """The namespaces that a keeper holds open, so that another process can enter them."""

    keeper: int
    namespaces: tuple[int, ...]  # for each host, the keeper's file descriptor of its network namespace
    user: int | None  # the keeper's file descriptor of the user namespace around them, if there is one

    def control_address(self, host: int) -> str:
        """The address of a host on the control network."""
        return f"10.78.0.{host + 1}"


def enter(hosts: Hosts, host: int) -> None:
    """Move this process to a host. Call it before anything opens a socket or starts a thread."""
    network = os.open(f"/proc/{hosts.keeper}/fd/{hosts.namespaces[host]}", os.O_RDONLY | os.O_CLOEXEC)
    if hosts.user is not None:
        user = os.open(f"/proc/{hosts.keeper}/fd/{hosts.user}", os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", user, CLONE_NEWUSER)
        os.close(user)
        _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    _call("setns", network, CLONE_NEWNET)
    os.close(network)
    os.environ["MASTER_ADDR"] = hosts.control_address(0)
    os.environ |= {INTERFACE_VARIABLE: LINK_INTERFACE, CONTROL_INTERFACE_VARIABLE: CONTROL_INTERFACE}
    os.environ["GLOO_SOCKET_IFNAME"] = LINK_INTERFACE
    # NCCL would detect one machine and bypass the link
    os.environ |= {"NCCL_SOCKET_IFNAME": LINK_INTERFACE, "NCCL_P2P_DISABLE": "1"}
    os.environ |= {"NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep(levels: list[tuple[int, float]]) -> None:
    """Make the hosts, write them as one line of JSON, answer each input line with the bytes of the uplinks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    user = _own_network()
    switch = _namespace()
    hosts = []
    for _ in range(prod(count for count, _ in levels)):
        _call("unshare", CLONE_NEWNET)
        hosts.append(_namespace())
    _call("setns", switch, CLONE_NEWNET)
    uplinks = _connect(levels, hosts)
    for host, namespace in enumerate(hosts):
        _call("setns", namespace, CLONE_NEWNET)
        _set_up_host(host, levels[0][1])
    _call("setns", switch, CLONE_NEWNET)
    _write(asdict(Hosts(os.getpid(), tuple(hosts), user)))
    for _ in sys.stdin:
        _write(_sent_bytes(uplinks))


def token_bucket(interface: str, rate_bps: float) -> str:
    """The arguments of `tc` that limit an interface to a rate.

    The bucket holds two frames, or two milliseconds of a fast link: what it holds passes at once after a pause, which a
    real link does not allow. The queue is long: with a queue that drops packets, one would measure the recovery of TCP.
    """
    burst = max(2 * FRAME_BYTES, int(rate_bps / 8 * 0.002))
    limit = burst + max(8_000_000, int(rate_bps / 8 * 0.05))
    return f"qdisc add dev {interface} root tbf rate {rate_bps:.0f}bit burst {burst} limit {limit}"


def _connect(levels: list[tuple[int, float]], hosts: list[int]) -> list[str]:
    """Connect hosts to the switch of their site, sites to the next switch, and so on. Returns the uplinks' names."""
    ip = ["link set dev lo up", _bridge("control"), "link set dev control addrgenmode none up"]
    tc = []
    uplinks = []
    size = 1  # hosts below one switch
    for level, (count, rate_bps) in enumerate(levels):
        size *= count
        for index in range(len(hosts) // size):
            ip += [_bridge(f"b{level}.{index}"), f"link set dev b{level}.{index} addrgenmode none up"]
        if level == 0:
            continue
        for below in range(len(hosts) * count // size):  # each switch of the level below
            up, down = f"u{level}.{below}", f"d{level}.{below}"
            ip += [_pair(up, down), _attach(up, f"b{level - 1}.{below}"), _attach(down, f"b{level}.{below // count}")]
            tc += [token_bucket(interface, rate_bps) for interface in (up, down)]
            uplinks.append(up)
    for host, namespace in enumerate(hosts):
        there = f" netns /proc/{os.getpid()}/fd/{namespace}"
        ip += [_pair(f"h{host}", LINK_INTERFACE) + there, _attach(f"h{host}", f"b0.{host // levels[0][0]}")]
        ip += [_pair(f"c{host}", CONTROL_INTERFACE) + there, _attach(f"c{host}", "control")]
        tc.append(token_bucket(f"h{host}", levels[0][1]))
    _batch("ip", ip)
    _batch("tc", tc)
    return uplinks


def _bridge(name: str) -> str:
    return f"link add name {name} mtu {FRAME_BYTES} type bridge mcast_snooping 0"


def _pair(ours: str, theirs: str) -> str:
    return f"link add name {ours} mtu {FRAME_BYTES} type veth peer name {theirs} mtu {FRAME_BYTES}"


def _attach(interface: str, switch: str) -> str:
    return f"link set dev {interface} master {switch} addrgenmode none up"


def _set_up_host(host: int, rate_bps: float) -> None:
    lines = ["link set dev lo up"]
    for interface, net in ((LINK_INTERFACE, 77), (CONTROL_INTERFACE, 78)):
        lines.append(f"link set dev {interface} addrgenmode none")
        lines.append(f"addr add 10.{net}.0.{host + 1}/24 dev {interface}")
        lines.append(f"link set dev {interface} up")
    _batch("ip", lines)
    _batch("tc", [token_bucket(LINK_INTERFACE, rate_bps)])


def _sent_bytes(interfaces: list[str]) -> dict[str, int]:
    shown = subprocess.run(["ip", "-s", "-j", "link", "show"], capture_output=True, text=True, timeout=60, check=True)
    counted = {each["ifname"]: each["stats64"]["tx"]["bytes"] for each in json.loads(shown.stdout)}
    return {interface: counted[interface] for interface in interfaces}


def _own_network() -> int | None:
    """Leave the machine's network. Returns the descriptor of the user namespace, if that needed one."""
    try:
        _call("unshare", CLONE_NEWNET)
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        die_with_parent()  # the change of credentials has cleared it
        return os.open("/proc/self/ns/user", os.O_RDONLY)
    return None


def _namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _batch(command: str, lines: list[str]) -> None:
    text = "\n".join(lines) + "\n"
    done = subprocess.run([command, "-batch", "-"], input=text, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise OSError(f"{command}: {' '.join(done.stderr.split())}")


def _call(name: str, *arguments: int) -> None:
    """Make a system call through the C library, and raise its error."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _write(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _main(verb: str, *words: str) -> None:
    if verb == "keep":
        try:
            keep([(int(count), float(rate)) for count, _, rate in (word.partition("@") for word in words)])
        except OSError as error:
            _write({"error": error.strerror or str(error)})
            sys.exit(1)
        return
    hosts = json.loads(words[0])  # "enter": this worker becomes the command
    if hosts is not None:
        enter(Hosts(**hosts), int(os.environ["LOCAL_RANK"]))
    if sys.platform == "linux":
        die_with_parent()
    os.execvp(words[1], list(words[1:]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
