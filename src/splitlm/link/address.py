"""Addresses of sockets, in words and as the system wants them; its errors about them become ours."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import Any

from splitlm.core.errors import AddressBusyError, NetworkError, UsageError


def describe(address: Any) -> str:
    """``host:port`` of a socket address."""
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def resolve(host: str, port: int, flags: int = 0) -> tuple[int, tuple[str, int]]:
    """Address family and address of a host; IPv4 first, so that ``localhost`` means the same on both sides.

    Raises:
        UsageError: a port out of range.
        NetworkError: the name cannot be resolved.
    """
    where = describe((host, port))
    if not 0 <= port <= 65535:
        raise UsageError(f"{port} is not a port", where=where, expected="a number from 0 to 65535")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
    except (socket.gaierror, UnicodeError) as error:
        raise NetworkError(
            f"The host {host!r} cannot be resolved ({error})",
            where=where,
            expected="a name or address that this machine can find",
            remedy="Check its spelling, /etc/hosts and the name server",
        ) from error
    found.sort(key=lambda info: info[0] != socket.AF_INET)
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def listen_error(error: OSError, host: str, port: int) -> NetworkError:
    """The error of ours for a bind or listen that failed."""
    where = describe((host, port))
    match error.errno:
        case errno.EADDRINUSE:
            return AddressBusyError(
                f"Port {port} is in use by another process",
                where=where,
                remedy="Choose another port, or stop the process that holds it",
            )
        case errno.EACCES | errno.EPERM:
            return AddressBusyError(
                f"Port {port} may not be opened by this user", where=where, remedy="Choose a port from 1024 up"
            )
        case errno.EADDRNOTAVAIL:
            return NetworkError(
                f"{host} is not an address of this machine",
                where=where,
                expected="one of its own addresses",
                remedy="Use 0.0.0.0 to listen on all of them",
            )
        case _:
            return NetworkError(f"This address cannot be listened on ({error.strerror or error})", where=where)
