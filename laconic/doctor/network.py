"""The address that gloo announces to the other workers, and MASTER_ADDR.

gloo uses the interface in GLOO_SOCKET_IFNAME. Without it, gloo resolves this host's name and binds to the first address
that it can, else to the loopback. Debian and Ubuntu write `127.0.1.1 myhost` into /etc/hosts: then every worker
announces 127.0.1.1, where each of the others finds only itself.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from laconic.doctor.finding import Finding, ok, problem, warning

GLOO = "gloo's interface"
NOT_REACHABLE = "Workers on other hosts cannot connect to this one."


@dataclass(frozen=True)
class Host:
    """A machine as the checks see it. Tests describe other machines with it."""

    name: str
    interfaces: Sequence[str]
    resolve: Callable[[str], Sequence[str]]
    can_bind: Callable[[str], bool]

    @property
    def outward(self) -> list[str]:
        """The interfaces other than the loopback."""
        return [name for name in self.interfaces if name not in ("lo", "lo0")]


def host_here() -> Host:
    """Return this machine."""
    return Host(socket.gethostname(), [name for _, name in socket.if_nameindex()], resolve, can_bind)


def resolve(name: str) -> list[str]:
    """Return the addresses of a name; an empty list if it cannot be resolved."""
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


def check_network(host: Host, environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    """Run all network checks of one host."""
    wanted = environ.get("GLOO_SOCKET_IFNAME")
    return [
        _chosen_interface(host, wanted, several_hosts) if wanted else _default_address(host, several_hosts),
        *_master_address(host, environ, several_hosts),
    ]


def _chosen_interface(host: Host, wanted: str, several_hosts: bool) -> Finding:
    names = wanted.split(",")
    missing = [name for name in names if name not in host.interfaces]
    if missing:
        found = f"GLOO_SOCKET_IFNAME={wanted}: this host has no interface {missing[0]}"
        return problem(GLOO, found, "gloo cannot start.", f"Choose from: {', '.join(host.interfaces)}.")
    if several_hosts and not set(names) & set(host.outward):
        return problem(GLOO, f"GLOO_SOCKET_IFNAME={wanted} is the loopback", NOT_REACHABLE, _set_interface(host))
    return ok(GLOO, f"{wanted}, from GLOO_SOCKET_IFNAME")


def _default_address(host: Host, several_hosts: bool) -> Finding:
    address = next((each for each in host.resolve(host.name) if host.can_bind(each)), None)
    if address is not None and not _is_loopback(address):
        return ok(GLOO, f"the one with {address}, to which this host's name, {host.name}, resolves")
    found = f"this host's name, {host.name}, resolves to {address or 'no address of this host'}"
    way_out = f"{_set_interface(host)} Or let {host.name} resolve to its real address in /etc/hosts."
    if several_hosts:
        return problem(GLOO, found, f"gloo announces {address or 'the loopback'}. {NOT_REACHABLE}", way_out)
    return warning(GLOO, found, f"This works on one host. {NOT_REACHABLE}", f"For several hosts: {way_out}")


def _set_interface(host: Host) -> str:
    return f"Set GLOO_SOCKET_IFNAME to the interface that joins the hosts ({', '.join(host.outward) or 'none here'})."


def _master_address(host: Host, environ: Mapping[str, str], several_hosts: bool) -> list[Finding]:
    name = environ.get("MASTER_ADDR")
    if not name:
        return []
    addresses = host.resolve(name)
    shown = f"MASTER_ADDR={name}" + ("" if name in addresses else f" ({', '.join(addresses) or 'cannot be resolved'})")
    if not addresses:
        way_out = "Use an address, or add the name to /etc/hosts on every host."
        return [problem("master address", shown, "This worker cannot find worker 0.", way_out)]
    if several_hosts and _is_loopback(addresses[0]):
        why = "Each host looks for worker 0 on itself."
        return [problem("master address", shown, why, "Use an address of worker 0's host that the others can reach.")]
    return [ok("master address", f"{shown}, port {environ.get('MASTER_PORT', 'unset')}")]


def _is_loopback(address: str) -> bool:
    return ip_address(address.partition("%")[0]).is_loopback
