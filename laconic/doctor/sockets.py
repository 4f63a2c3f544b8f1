"""Which sockets listen on this machine, and who could reach them: from /proc/net/tcp and tcp6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from laconic.doctor.finding import Finding, ok, warning
from laconic.elastic.addresses import Card, is_loopback

LISTENING = "0A"
SHOWN = 8
STORE = "torch's TCP store listens on all interfaces, without authentication"
WAY_OUT = "Let a firewall admit only the workers' hosts, or meet over a VPN such as WireGuard."


@dataclass(frozen=True, order=True)
class Listener:
    """A listening socket."""

    address: str
    port: int

    @property
    def everywhere(self) -> bool:
        """Whether it listens on all interfaces."""
        return ip_address(self.address).is_unspecified


def listeners(folder: Path) -> list[Listener]:
    """What listens, from the kernel's tables in `folder`, which is /proc/net."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            lines = (folder / name).read_text().splitlines()[1:]
        except OSError:
            continue
        rows = [line.split() for line in lines]
        found |= {_listener(row[1]) for row in rows if len(row) > 3 and row[3] == LISTENING}
    return sorted(found)


def _listener(text: str) -> Listener:
    """The kernel writes addresses as hexadecimal words in the machine's own byte order.

    >>> _listener("0100007F:1F90")
    Listener(address='127.0.0.1', port=8080)
    """
    address, _, port = text.partition(":")
    raw = bytes.fromhex(address)
    swapped = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
    shown = IPv4Address(swapped) if len(swapped) == 4 else IPv6Address(swapped)
    return Listener(str(shown), int(port, 16))


def check_sockets(found: Sequence[Listener], cards: Sequence[Card], environ: Mapping[str, str]) -> Finding:
    """Says what listens where. It is a warning where an address of this host is a public one."""
    reachable = [each for each in found if each.everywhere or not is_loopback(each.address)]
    ports = sorted({each.port for each in reachable})
    shown = f"{len(found)} listening, " + (
        f"{len(reachable)} of them reachable from outside: {', '.join(map(str, ports[:SHOWN]))}"
        + (", ..." if len(ports) > SHOWN else "")
        if reachable
        else "none of them reachable from outside"
    )
    master = environ.get("MASTER_PORT", "")
    if master.isdigit() and any(each.everywhere and each.port == int(master) for each in found):
        shown += f"; the store is at {master}, on all interfaces"
    public = [card for card in cards if ip_address(card.address).is_global]
    if public:
        return warning("sockets", f"{shown}. {public[0].address} is a public address, and {STORE}", WAY_OUT)
    return ok("sockets", shown, f"{STORE}. {WAY_OUT}")
