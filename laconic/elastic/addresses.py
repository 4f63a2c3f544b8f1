"""Which addresses this machine has, and which of them gloo would tell the others.

gloo takes the interface in GLOO_SOCKET_IFNAME. Without it, it resolves this host's name and binds to the first address
that it can, or else to the loopback.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Card:
    """A network interface with one of its addresses."""

    name: str
    address: str


def cards_here(if_inet6: Path = Path("/proc/net/if_inet6")) -> list[Card]:
    """Interfaces and their addresses: IPv4 as the kernel tells, IPv6 from its file, but those of one link only."""
    cards = [Card(name, address) for _, name in socket.if_nameindex() if (address := _ipv4_of(name)) is not None]
    return cards + ipv6_cards(if_inet6)


def ipv6_cards(if_inet6: Path) -> list[Card]:
    """The IPv6 addresses of /proc/net/if_inet6."""
    try:
        lines = [line.split() for line in if_inet6.read_text().splitlines()]
    except OSError:
        return []
    found = [Card(words[5], str(IPv6Address(bytes.fromhex(words[0])))) for words in lines if len(words) == 6]
    return [card for card in found if not ip_address(card.address).is_link_local]


def _ipv4_of(card: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", card.encode()[:15]))
        except OSError:  # it is down, or has no IPv4 address
            return None
    return str(IPv4Address(answer[20:24]))


def resolve(name: str) -> list[str]:
    """The addresses of a name; none if nobody knows it."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def can_bind(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        with socket.socket(family_of(address)) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def family_of(address: str) -> socket.AddressFamily:
    """Whether an address is IPv4's or IPv6's."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def is_loopback(address: str) -> bool:
    """Whether an address means "this very machine", whoever reads it."""
    return ip_address(address.partition("%")[0]).is_loopback


def gloos_address(environ: Mapping[str, str]) -> str | None:
    """The address at which gloo lets others reach this worker, or None where the interface it wants is not there."""
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    if wanted:
        first = wanted.split(",")[0]
        return next((card.address for card in cards_here() if card.name == first), None)
    return own_address(socket.gethostname(), resolve, can_bind) or "127.0.0.1"


def own_address(name: str, resolve: Callable[[str], Sequence[str]], can_bind: Callable[[str], bool]) -> str | None:
    """The first of the addresses to which a name leads that is this machine's own."""
    return next((address for address in resolve(name) if can_bind(address)), None)
