"""Which address this machine would tell the others: interfaces, its own name, and the name of the first worker's host.

`addresses.py` says how gloo chooses. Debian and Ubuntu write `127.0.1.1 myhost` into /etc/hosts, and then every worker
tells the others to reach it at 127.0.1.1, where each of them finds only itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from laconic.doctor.finding import Finding, ok, problem, warning
from laconic.elastic.addresses import Card, can_bind, cards_here, is_loopback, own_address, resolve

Resolver: TypeAlias = Callable[[str], Sequence[str]]
Binder: TypeAlias = Callable[[str], bool]


@dataclass(frozen=True)
class Host:
    """What the checks ask of a machine; tests give them another one."""

    name: str
    cards: tuple[Card, ...]
    resolve: Resolver
    can_bind: Binder


def host_here() -> Host:
    """What this machine is."""
    return Host(socket.gethostname(), tuple(cards_here()), resolve, can_bind)


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
    address = own_address(host.name, host.resolve, host.can_bind)
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
