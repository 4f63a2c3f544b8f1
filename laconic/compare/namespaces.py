"""Hosts of their own on one machine: Linux network namespaces that nothing has to remember to remove.

A keeper process makes the namespaces and holds them open; they have no names and no files. When the keeper ends
and the last worker in them has ended, the kernel removes them with all that is inside. The keeper ends when the
pipe from the process that started it closes, and that happens however that process ends, `kill -9` included.

Inside, each host has two network cards: `eth0`, the link under study, and `control0`, over which workers find each
other and agree to stop; so the counters of `eth0` hold training traffic alone. Neither leads outside. Rates are kept
by token buckets (`tc tbf`) in both directions: at each host's card, and at the card that joins a site to the others.

As root this needs nothing more. Otherwise the keeper first makes a user namespace, in which it may do all this,
where the kernel allows that.

This file imports the standard library alone and also runs by itself: `python namespaces.py keep 2@1e9 2@5e7` is the
keeper, and `python namespaces.py enter LINK python train.py` runs a command inside a host.
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
LINK_CARD, CONTROL_CARD = "eth0", "control0"
FRAME_BYTES = 9000  # jumbo frames: TCP's headers and acknowledgements then stay near 1% of the bytes
MOST_HOSTS = 250  # an address each


@dataclass(frozen=True)
class Hosts:
    """The namespaces that a keeper holds, as another process needs to know them to enter one."""

    keeper: int
    cards: tuple[int, ...]  # for each host, the keeper's descriptor of its namespace
    user: int | None  # the keeper's descriptor of the user namespace around them, if it needed one

    def control_address(self, host: int) -> str:
        """Where a host is reached on the network that is not under study."""
        return f"10.78.0.{host + 1}"


def enter(hosts: Hosts, host: int) -> None:
    """Moves this process into a host. Call it before anything opens a socket or starts a thread."""
    card = os.open(f"/proc/{hosts.keeper}/fd/{hosts.cards[host]}", os.O_RDONLY | os.O_CLOEXEC)
    if hosts.user is not None:
        user = os.open(f"/proc/{hosts.keeper}/fd/{hosts.user}", os.O_RDONLY | os.O_CLOEXEC)
        _call("setns", user, CLONE_NEWUSER)
        os.close(user)
        _call("prctl", PR_SET_DUMPABLE, 1, 0, 0, 0)
    _call("setns", card, CLONE_NEWNET)
    os.close(card)
    os.environ["MASTER_ADDR"] = hosts.control_address(0)
    os.environ.update(GLOO_SOCKET_IFNAME=LINK_CARD, LACONIC_CARD=LINK_CARD, LACONIC_CONTROL_CARD=CONTROL_CARD)
    # NCCL would see one machine and go past the link
    os.environ.update(NCCL_SOCKET_IFNAME=LINK_CARD, NCCL_P2P_DISABLE="1", NCCL_SHM_DISABLE="1", NCCL_IB_DISABLE="1")


def die_with_parent() -> None:
    """Lets the kernel end this process when its parent ends, however it ends."""
    _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep(levels: list[tuple[int, float]]) -> None:
    """Makes the hosts, says so in one line of JSON, answers each line with the uplinks' bytes, ends with its input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    user = _own_network()
    switch = _namespace()
    cards = []
    for _ in range(prod(count for count, _ in levels)):
        _call("unshare", CLONE_NEWNET)
        cards.append(_namespace())
    _call("setns", switch, CLONE_NEWNET)
    uplinks = _wire_up(levels, cards)
    for host, card in enumerate(cards):
        _call("setns", card, CLONE_NEWNET)
        _set_up_host(host, levels[0][1])
    _call("setns", switch, CLONE_NEWNET)
    _say(asdict(Hosts(os.getpid(), tuple(cards), user)))
    for _ in sys.stdin:
        _say(_sent_bytes(uplinks))


def token_bucket(card: str, rate_bps: float) -> str:
    """The `tc` words that hold a card to a rate.

    The bucket takes a whole offloaded packet (64 kB), which the kernel would otherwise cut up, or two milliseconds
    of a fast link. The queue is long: a queue that drops would measure TCP's recovery instead of the link.
    """
    burst = max(70_000, int(rate_bps / 8 * 0.002))
    limit = burst + max(8_000_000, int(rate_bps / 8 * 0.05))
    return f"qdisc add dev {card} root tbf rate {rate_bps:.0f}bit burst {burst} limit {limit}"


def _wire_up(levels: list[tuple[int, float]], cards: list[int]) -> list[str]:
    """Joins hosts to their site's switch, sites to the next, and so on. Returns the names of the cards between."""
    ip = ["link set dev lo up", f"link add name control mtu {FRAME_BYTES} type bridge mcast_snooping 0"]
    tc = []
    size = 1  # hosts below one switch
    ups = []
    for level, (count, _) in enumerate(levels):
        size *= count
        for index in range(len(cards) // size):
            ip.append(f"link add name b{level}.{index} mtu {FRAME_BYTES} type bridge mcast_snooping 0")
            ip.append(f"link set dev b{level}.{index} addrgenmode none up")
        if level == 0:
            continue
        for below in range(len(cards) * count // size):  # each switch of the level below, up to its own
            up, down = f"u{level}.{below}", f"d{level}.{below}"
            ip.append(f"link add name {up} mtu {FRAME_BYTES} type veth peer name {down} mtu {FRAME_BYTES}")
            ip.append(f"link set dev {up} master b{level - 1}.{below} addrgenmode none up")
            ip.append(f"link set dev {down} master b{level}.{below // count} addrgenmode none up")
            tc += [token_bucket(card, levels[level][1]) for card in (up, down)]
            ups.append(up)
    ip.append("link set dev control addrgenmode none up")
    for host, card in enumerate(cards):
        there = f"netns /proc/{os.getpid()}/fd/{card}"
        for ours, theirs, switch in (
            (f"h{host}", LINK_CARD, f"b0.{host // levels[0][0]}"),
            (f"c{host}", CONTROL_CARD, "control"),
        ):
            ip.append(f"link add name {ours} mtu {FRAME_BYTES} type veth peer name {theirs} mtu {FRAME_BYTES} {there}")
            ip.append(f"link set dev {ours} master {switch} addrgenmode none up")
        tc.append(token_bucket(f"h{host}", levels[0][1]))
    _batch("ip", ip)
    _batch("tc", tc)
    return ups


def _set_up_host(host: int, rate_bps: float) -> None:
    lines = ["link set dev lo up"]
    for card, net in ((LINK_CARD, 77), (CONTROL_CARD, 78)):
        lines.append(f"link set dev {card} addrgenmode none")
        lines.append(f"addr add 10.{net}.0.{host + 1}/24 dev {card}")
        lines.append(f"link set dev {card} up")
    _batch("ip", lines)
    _batch("tc", [token_bucket(LINK_CARD, rate_bps)])


def _sent_bytes(cards: list[str]) -> dict[str, int]:
    shown = subprocess.run(["ip", "-s", "-j", "link", "show"], capture_output=True, text=True, timeout=60, check=True)
    counted = {card["ifname"]: card["stats64"]["tx"]["bytes"] for card in json.loads(shown.stdout)}
    return {card: counted[card] for card in cards}


def _own_network() -> int | None:
    """Leaves the machine's network, within a user namespace if it takes one; returns that one's descriptor."""
    try:
        _call("unshare", CLONE_NEWNET)
    except PermissionError:
        uid, gid = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWUSER | CLONE_NEWNET)
        for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        die_with_parent()  # a change of rights has cleared it
        return os.open("/proc/self/ns/user", os.O_RDONLY)
    return None


def _namespace() -> int:
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def _batch(command: str, lines: list[str]) -> None:
    done = subprocess.run(
        [command, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise OSError(f"{command}: {' '.join(done.stderr.split())}")


def _call(name: str, *arguments: int) -> None:
    """A system call of the C library, with its error raised."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _say(message: object) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _main(verb: str, *words: str) -> None:
    if verb == "keep":
        try:
            keep([(int(count), float(rate)) for count, _, rate in (word.partition("@") for word in words)])
        except OSError as error:
            _say({"error": error.strerror or str(error)})
            sys.exit(1)
        return
    found = json.loads(words[0])  # "enter": a worker that torchrun has started becomes the user's program
    if found is not None:
        enter(Hosts(found["keeper"], tuple(found["cards"]), found["user"]), int(os.environ["LOCAL_RANK"]))
    if sys.platform == "linux":
        die_with_parent()
    os.execvp(words[1], list(words[1:]))


if __name__ == "__main__":
    _main(*sys.argv[1:])
