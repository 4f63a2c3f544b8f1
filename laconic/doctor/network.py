"""Which address this machine would tell the others: interfaces, its own name, and the name of the first worker's host.

gloo takes the interface in GLOO_SOCKET_IFNAME. Without it, it resolves this host's name and binds to the first address
that it can. Debian and Ubuntu write `127.0.1.1 myhost` into /etc/hosts, and then every worker tells the others to
reach it at 127.0.1.1, where each of them finds only itself.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import TypeAlias

from laconic.doctor.finding import Finding, ok, problem, warning

SIOCGIFADDR = 0x8915
Resolver: TypeAlias = Callable[[str], Sequence[str]]
Binder: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True)
class Card:
    """A network interface with one of its addresses."""

    name: str
    address: str


@dataclass(frozen=True)
class Host:
    """What the checks ask of a machine; tests give them another one."""

    name: str
    cards: tuple[Card, ...]
    resolve: Resolver
    can_bind: Binder


def host_here() -> Host:
    """What this machine is."""
    return Host(socket.gethostname(), tuple(cards_here(Path("/proc/net/if_inet6"))), resolve, can_bind)


def cards_here(if_inet6: Path) -> list[Card]:
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
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address means "this very machine", whoever reads it."""
    return ip_address(address.partition("%")[0]).is_loopback


def check_interfaces(host: Host, environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    """Which interfaces there are, and which one gloo would take."""
    shown = ", ".join(f"{card.name} {card.address}" for card in host.cards) or "none that has an address"
    outward = [card for card in host.cards if not is_loopback(card.address)]
    findings = [ok("interfaces", shown)]
    if several_hosts and not outward:
        findings = [problem("interfaces", shown, "This host has no address but its own loopback. Connect it.")]
    return [*findings, _gloos_choice(host, environ, several_hosts, outward)]


def _gloos_choice(host: Host, environ: Mapping[str, str], several_hosts: bool, outward: Sequence[Card]) -> Finding:
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    if wanted:
        return _chosen(host, wanted, several_hosts, outward)
    address = next((address for address in host.resolve(host.name) if host.can_bind(address)), None)
    way_out = f"Set GLOO_SOCKET_IFNAME={outward[0].name if outward else 'eth0'} on this host"
    way_out += f", or let the name {host.name} lead to its real address in /etc/hosts."
    if address is None:
        found = f"this host's name, {host.name}, leads to no address of its own: gloo falls back to the loopback"
    elif is_loopback(address):
        found = f"this host's name, {host.name}, leads to {address}: gloo would tell the others to reach it there"
    else:
        card = next((card.name for card in host.cards if card.address == address), "an interface")
        return ok("gloo's interface", f"{card} {address}, where this host's name, {host.name}, leads")
    if several_hosts:
        return problem("gloo's interface", f"{found}, and no other host can", way_out)
    return warning("gloo's interface", f"{found}. That serves for workers on one host", f"For several: {way_out}")


def _chosen(host: Host, wanted: str, several_hosts: bool, outward: Sequence[Card]) -> Finding:
    known = {card.name for card in host.cards}
    missing = [name for name in wanted.split(",") if name not in known]
    if missing:
        return problem(
            "gloo's interface",
            f"GLOO_SOCKET_IFNAME={wanted}: {missing[0]} is no interface with an address on this host",
            f"Choose from: {', '.join(sorted(known)) or 'none'}.",
        )
    if several_hosts and not any(card.name in wanted.split(",") for card in outward):
        other = f" Set GLOO_SOCKET_IFNAME={outward[0].name}." if outward else ""
        return problem(
            "gloo's interface", f"GLOO_SOCKET_IFNAME={wanted} is the loopback", f"No other host can reach it.{other}"
        )
    return ok("gloo's interface", f"{wanted}, from GLOO_SOCKET_IFNAME")


def check_master(host: Host, environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    """Whether the name under which workers meet leads somewhere."""
    name = environ.get("MASTER_ADDR")
    if not name:
        return []
    addresses = host.resolve(name)
    if not addresses:
        way_out = "Use an address, or add the name to /etc/hosts on every host."
        return [problem("meeting point", f"MASTER_ADDR={name} cannot be resolved here", way_out)]
    shown = f"MASTER_ADDR={name}" + ("" if addresses == [name] else f", {', '.join(addresses)}")
    if several_hosts and is_loopback(addresses[0]):
        way_out = "Give the address of worker 0's host as the others see it, such as 10.0.0.1."
        return [problem("meeting point", f"{shown}: each host would look for worker 0 at itself", way_out)]
    return [ok("meeting point", f"{shown}, port {environ.get('MASTER_PORT', 'unset')}")]


def check_name(host: Host) -> Finding:
    """Whether this host's own name leads anywhere."""
    addresses = host.resolve(host.name)
    if not addresses:
        way_out = f"Add a line with its address and {host.name} to /etc/hosts."
        return warning("host name", f"{host.name} cannot be resolved: lookups may stall", way_out)
    return ok("host name", f"{host.name} is {', '.join(addresses)}")
