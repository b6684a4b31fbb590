"""Channels over TCP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from functools import partial

from splitlm.core.errors import PeerLostError, PeerMissingError
from splitlm.link.address import describe, listen_error, resolve
from splitlm.link.base import StreamChannel
from splitlm.link.lobby import HANDSHAKE_S, Lobby
from splitlm.link.secure import Secured
from splitlm.wire.handshake import Handshake, Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose

RETRY_S = (0.01, 0.1)
"""First and longest pause between two attempts to connect."""
KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""A machine that vanished silently is found after 5 s of silence and 3 unanswered probes 2 s apart."""


class TcpListener:
    """A ``Listener`` (wire/channel.py) on one TCP port. Made by ``listen``."""

    def __init__(
        self,
        identity: Identity,
        purpose: Purpose,
        pool: BufferPool | None,
        expect_peer: str,
        handshake_s: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._identity, self._expect_peer, self._tls = identity, expect_peer, tls
        self._lobby = Lobby(identity, purpose, pool, handshake_s)
        self._server: asyncio.Server | None = None
        self._address: tuple[str, int] = ("", 0)

    @property
    def host(self) -> str:
        """The bound host."""
        return self._address[0]

    @property
    def port(self) -> int:
        """The bound port; the chosen one when 0 was asked for."""
        return self._address[1]

    @property
    def tls(self) -> ssl.SSLContext | None:
        """How arriving connections are secured; None leaves them plain."""
        return self._tls

    async def start(self, sock: socket.socket) -> None:
        """Listen on a bound socket."""
        loop = asyncio.get_running_loop()
        self._address = sock.getsockname()[:2]
        self._server = await loop.create_server(partial(_Arrival, self), sock=sock, backlog=128, start_serving=False)
        await self._server.start_serving()  # gives up a turn, and may be cancelled in it: ``close`` knows the server

    async def accept(self, *, deadline_s: float | None = None, who: str = "") -> StreamChannel:
        """The next peer that passed the handshake. Others are refused and logged.

        Args:
            deadline_s: how long to wait; None waits for ever.
            who: who is awaited, for the error; ``expect_peer`` of ``listen`` when empty.

        Raises:
            PeerMissingError: nobody came before the deadline.
            NetworkError: the listener was closed.
        """
        try:
            async with asyncio.timeout(deadline_s):
                return await self._lobby.accept(describe(self._address))
        except TimeoutError:
            raise PeerMissingError(
                f"{self._identity.claims.node} waited {deadline_s:g} s for {who or self._expect_peer}",
                where=describe(self._address),
                remedy="Check that it was started and was given this address",
            ) from None

    async def close(self) -> None:
        """Stop listening and drop whoever was not accepted; channels that were accepted stay. Safe to call twice."""
        if self._server is not None:
            self._server.close()
        await self._lobby.close()

    def admit(self, where: str) -> StreamChannel | None:
        """A channel for a connection that arrived, or None when too many are unfinished."""
        return self._lobby.admit(where)


class _Arrival(asyncio.Protocol):
    """Looks at the address of a connection that arrived, and hands it to a channel."""

    def __init__(self, listener: TcpListener) -> None:
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set the socket's options; then the channel takes over, or the connection is dropped."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        name = transport.get_extra_info("peername")
        where, tls = describe(name) if name else "a peer", self._listener.tls
        _tune(transport)
        if tls is not None:
            secured = Secured(tls, True, where, partial(self._listener.admit, where))
            transport.set_protocol(secured)
            secured.connection_made(transport)
            return
        channel = self._listener.admit(where)
        if channel is None:
            transport.abort()
            return
        transport.set_protocol(channel)
        channel.connection_made(transport)


async def listen(
    host: str,
    port: int,
    identity: Identity,
    purpose: Purpose,
    *,
    pool: BufferPool | None = None,
    expect_peer: str = "a peer",
    handshake_s: float = HANDSHAKE_S,
    tls: ssl.SSLContext | None = None,
) -> TcpListener:
    """Listen at ``host:port``; port 0 chooses a free one.

    Args:
        host: an address or name of this machine; ``0.0.0.0`` for all.
        port: 0 to 65535.
        identity: who this process is; its claims may be replaced later, they are read at each handshake.
        purpose: dialler and listener must mean the same.
        pool: receive buffers shared by all channels; by default each has its own.
        expect_peer: who is to come, for messages.
        handshake_s: seconds an arriving peer may take for its handshake.
        tls: a listener's context (``wire.tls``); None leaves the links plain.

    Raises:
        UsageError: a port out of range.
        AddressBusyError: the port is taken, or not allowed.
        NetworkError: the host is not an address of this machine.
    """
    family, address = await resolve(host, port, socket.AI_PASSIVE)
    listener = TcpListener(identity, purpose, pool, expect_peer, handshake_s, tls)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # A port that was closed a moment ago may be taken again; one that is in use may not (Linux, macOS).
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        await listener.start(sock)
    except BaseException as error:
        await listener.close()
        sock.close()
        if isinstance(error, OSError):
            raise listen_error(error, host, port) from error
        raise
    return listener


async def connect(
    host: str,
    port: int,
    identity: Identity,
    purpose: Purpose,
    *,
    deadline_s: float,
    who: str,
    pool: BufferPool | None = None,
    tls: ssl.SSLContext | None = None,
) -> StreamChannel:
    """Connect to a listener, and wait for it while it is not up yet.

    Args:
        host: where the peer listens.
        port: of the peer.
        identity: who this process is.
        purpose: what the link is for.
        deadline_s: how long to wait for the peer, handshake included.
        who: the peer's name in messages (``stage 1``).
        pool: receive buffers; by default the channel's own.
        tls: a dialler's context (``wire.tls``); None leaves the link plain.

    Raises:
        PeerMissingError: the peer was not there before the deadline.
        PeerRefusedError: the two sides do not agree, or one does not take the other's certificate.
        ProtocolError: whoever listens there does not speak this protocol.
        NetworkError: the host's name cannot be resolved.
        UsageError: a port out of range.
    """
    family, address = await resolve(host, port)
    where = describe((host, port))
    pause, last = RETRY_S[0], ""
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                try:
                    return await _attempt(family, address, identity, purpose, f"{who} at {where}", pool, tls)
                except PeerLostError as error:
                    last = error.what
                except OSError as error:
                    last = os.strerror(error.errno) if error.errno else str(error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_S[1])
    except TimeoutError:
        raise PeerMissingError(
            f"{identity.claims.node} waited {deadline_s:g} s for {who} at {where}",
            expected=f"it to listen there (last seen: {last or 'no answer'})",
            remedy="Check that it was started, and that no firewall is in between",
        ) from None


async def _attempt(
    family: int,
    address: tuple[str, int],
    identity: Identity,
    purpose: Purpose,
    where: str,
    pool: BufferPool | None,
    tls: ssl.SSLContext | None,
) -> StreamChannel:
    """One connection and its handshake."""
    loop = asyncio.get_running_loop()
    channel = StreamChannel(
        "dialler", purpose, where, pool or BufferPool(), handshake=Handshake("dialler", purpose, identity, where)
    )
    inner = channel if tls is None else Secured(tls, False, where, lambda: channel)
    transport, _ = await loop.create_connection(lambda: inner, *address[:2], family=family)
    _tune(transport)
    try:
        await asyncio.wait({channel.settled})
    except asyncio.CancelledError:
        transport.abort()
        await channel.close()
        raise
    if channel.error is not None and not channel.admitted:
        await channel.close()
        raise channel.error
    return channel


def _tune(transport: asyncio.Transport) -> None:
    """No delay for small frames, and keep-alive probes where the platform has them."""
    sock = transport.get_extra_info("socket")
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    options += [(socket.IPPROTO_TCP, getattr(socket, key), value) for key, value in KEEPALIVE if hasattr(socket, key)]
    with contextlib.suppress(OSError):  # the peer may be gone already; the first read says so
        for level, option, value in options:
            sock.setsockopt(level, option, value)
