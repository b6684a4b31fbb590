"""Which addresses are this machine's own, and by which one it is reached from another."""

from __future__ import annotations

import ipaddress
import socket

LOOPBACK = "127.0.0.1"
NO_NETWORK = ("", "memory", "localhost")
"""Hosts that are not said, or where there is no network between."""


def loopback(host: str) -> bool:
    """Whether nobody outside this machine is behind a host; an empty one is one that is not said."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in NO_NETWORK
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def facing(host: str) -> str:
    """This machine's address on the way to a host, ``LOOPBACK`` where there is no way. Nothing is sent."""
    if host in NO_NETWORK:
        return LOOPBACK
    try:
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError):
        return LOOPBACK
