"""The network addresses of this machine."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Interface:
    """A network interface with one of its addresses."""

    name: str
    address: str


def interfaces(if_inet6: Path = Path("/proc/net/if_inet6")) -> list[Interface]:
    """Return the interfaces with their addresses, without link-local IPv6 addresses."""
    names = [name for _, name in socket.if_nameindex()]
    found = [Interface(name, address) for name in names if (address := _ipv4_of(name)) is not None]
    return found + ipv6_interfaces(if_inet6)


def ipv6_interfaces(if_inet6: Path) -> list[Interface]:
    """Return the IPv6 addresses in /proc/net/if_inet6."""
    try:
        lines = [line.split() for line in if_inet6.read_text().splitlines()]
    except OSError:
        return []
    found = [Interface(words[5], str(IPv6Address(bytes.fromhex(words[0])))) for words in lines if len(words) == 6]
    return [each for each in found if not ip_address(each.address).is_link_local]


def _ipv4_of(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # it is down, or has no IPv4 address
            return None
    return str(IPv4Address(answer[20:24]))


def resolve(name: str) -> list[str]:
    """Return the addresses of a host name; none if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def can_bind(address: str) -> bool:
    """Return whether an address belongs to this machine."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether an address is a loopback address."""
    return ip_address(address.partition("%")[0]).is_loopback


def own_address(name: str, resolve: Callable[[str], Sequence[str]], can_bind: Callable[[str], bool]) -> str | None:
    """Return the first address of a host name that belongs to this machine. gloo chooses the same one."""
    return next((address for address in resolve(name) if can_bind(address)), None)


Card, cards_here, ipv6_cards = Interface, interfaces, ipv6_interfaces  # old names, which laconic.doctor still imports
