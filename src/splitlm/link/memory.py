"""Channels inside one process, for tests: the same channel as TCP's, over a pipe in memory.

Frames are encoded, cut into reads, decoded, and held back as over a socket; only the kernel is missing.
"""

from __future__ import annotations

import asyncio

from splitlm.core.errors import NetworkError
from splitlm.link.base import StreamChannel
from splitlm.link.lobby import Lobby
from splitlm.link.reading import ReadingHalf
from splitlm.wire.handshake import Claims, Handshake, Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose

CAPACITY = 256 * 1024
"""Bytes that a direction holds, like a socket's buffers, before its writer is told to pause."""


class MemoryTransport(ReadingHalf):
    """One end of a pipe in memory. Made by ``join``."""

    def __init__(self, protocol: asyncio.BufferedProtocol) -> None:
        super().__init__(protocol)
        self._other: MemoryTransport = self
        self._writing_paused = self._ended = self._gone = False

    def attach(self, other: MemoryTransport) -> None:
        """Join the other end, and start the protocol."""
        self._other = other
        self._protocol.connection_made(self)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The pipe has one size; ``CAPACITY`` stands for what a kernel would take."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Put bytes into the pipe; they are copied."""
        if self._closing or self._ended:
            return
        self._other._hold(memoryview(bytes(data)))
        if self._other._held > CAPACITY and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()
        self._other._schedule()

    def can_write_eof(self) -> bool:
        """Whether ``write_eof`` works."""
        return True

    def write_eof(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._other._inbound_ended = True
        self._other._schedule()

    def close(self) -> None:
        """End this side, after what was written."""
        if not self._closing:
            self.write_eof()
            self._closing = True
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """End this side at once, as a killed process does; the other side still gets what is in the pipe."""
        if not self._gone:
            self._closing = True
            self._spill()
            self._other._inbound_ended = True
            self._other._schedule()
            self._loop.call_soon(self._lose, None)

    def reset(self) -> None:
        """Lose the connection: both sides see a reset, and bytes under way are gone."""
        for end in (self, self._other):
            end._closing = True
            end._spill()
            self._loop.call_soon(end._lose, ConnectionResetError("connection reset"))

    def _read_on(self) -> None:
        """The other side writes on when this one has read half of what the pipe holds."""
        other = self._other
        if other._writing_paused and self._held <= CAPACITY // 2:
            other._writing_paused = False
            other._protocol.resume_writing()

    def _lose(self, error: Exception | None) -> None:
        if not self._gone:
            self._gone = True
            self._protocol.connection_lost(error)


def join(a: StreamChannel, b: StreamChannel) -> tuple[MemoryTransport, MemoryTransport]:
    """Join two channels by a pipe."""
    left, right = MemoryTransport(a), MemoryTransport(b)
    right.attach(left)
    left.attach(right)
    return left, right


def pair(
    claims_a: Claims,
    claims_b: Claims,
    *,
    purpose: Purpose = "data",
    pool_a: BufferPool | None = None,
    pool_b: BufferPool | None = None,
) -> tuple[StreamChannel, StreamChannel]:
    """Two channels joined in memory, with no handshake; to be called in a running event loop.

    The first is the dialler's: on a ``data`` link it sends and the second receives. ``claims_a`` are those of the first
    node, so ``b.claims == claims_a``.
    """
    a = StreamChannel("dialler", purpose, "memory", pool_a or BufferPool(), claims=claims_b)
    b = StreamChannel("listener", purpose, "memory", pool_b or BufferPool(), claims=claims_a)
    join(a, b)
    return a, b


class MemoryListener:
    """A ``Listener`` (wire/channel.py) that ``connect`` of this module reaches."""

    host = "memory"
    port = 0

    def __init__(self, identity: Identity, purpose: Purpose) -> None:
        self._lobby = Lobby(identity, purpose)

    async def accept(self) -> StreamChannel:
        """The next peer that passed the handshake.

        Raises:
            NetworkError: the listener was closed.
        """
        return await self._lobby.accept(self.host)

    async def close(self) -> None:
        """Stop listening; channels that were accepted stay."""
        await self._lobby.close()

    def admit(self) -> StreamChannel:
        """The listening side's channel for a new connection.

        Raises:
            NetworkError: the listener was closed, or too many handshakes are under way.
        """
        channel = self._lobby.admit(self.host)
        if channel is None:
            raise NetworkError("Nobody listens", where=self.host)
        return channel


async def connect(listener: MemoryListener, identity: Identity, purpose: Purpose) -> StreamChannel:
    """Meet a listener of this process, with a handshake.

    Raises:
        NetworkError: the two sides do not agree, or the listener is closed.
    """
    channel = StreamChannel(
        "dialler", purpose, "memory", BufferPool(), handshake=Handshake("dialler", purpose, identity, "memory")
    )
    join(channel, listener.admit())
    await asyncio.wait({channel.settled})
    if channel.error is not None and not channel.admitted:
        await channel.close()
        raise channel.error
    return channel
