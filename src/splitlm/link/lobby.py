"""Where peers wait at a listener: first for their handshake, then to be accepted."""

from __future__ import annotations

import asyncio
import logging

from splitlm.core.errors import NetworkError, ProtocolError
from splitlm.link.base import StreamChannel
from splitlm.wire.handshake import Handshake, Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose

HANDSHAKE_S = 10.0
"""How long an arriving peer may take for its handshake."""
MAX_UNFINISHED = 32
"""Handshakes that may be under way at one listener; who comes meanwhile is dropped, until one ends."""

_log = logging.getLogger("splitlm.link")


class Lobby:
    """To be made in a running event loop.

    Args:
        identity: who listens; its claims may be replaced later, they are read at each handshake.
        purpose: dialler and listener must mean the same.
        pool: receive buffers shared by all channels; None gives each its own.
        handshake_s: seconds an arriving peer may take for its handshake.
    """

    def __init__(
        self, identity: Identity, purpose: Purpose, pool: BufferPool | None = None, handshake_s: float = HANDSHAKE_S
    ) -> None:
        self.closed = False
        self.unfinished: dict[StreamChannel, asyncio.TimerHandle] = {}
        """Handshakes under way, with the timer of each."""
        self._identity, self._purpose, self._pool = identity, purpose, pool
        self._handshake_s = handshake_s
        self._ready: asyncio.Queue[StreamChannel | None] = asyncio.Queue()

    def admit(self, where: str) -> StreamChannel | None:
        """A channel for a peer that arrived; None once the lobby is closed, or where too many are unfinished."""
        if self.closed or len(self.unfinished) >= MAX_UNFINISHED:
            _log.warning("%s: dropped, %d handshakes are unfinished", where, len(self.unfinished))
            return None
        channel = StreamChannel(
            "listener",
            self._purpose,
            where,
            self._pool or BufferPool(),
            handshake=Handshake("listener", self._purpose, self._identity, where),
            on_settled=self._settled,
        )
        loop = asyncio.get_running_loop()
        self.unfinished[channel] = loop.call_later(self._handshake_s, self._too_slow, channel)
        return channel

    def forget(self, channel: StreamChannel) -> None:
        """A channel's connection did not come about."""
        if (timer := self.unfinished.pop(channel, None)) is not None:
            timer.cancel()

    async def accept(self, where: str) -> StreamChannel:
        """The next peer that passed the handshake. Others are refused and logged.

        Args:
            where: the listener's address, for the error.

        Raises:
            NetworkError: the lobby was closed.
        """
        while (channel := await self._ready.get()) is not None:
            if channel.pending or not channel.lost.done():
                return channel
        self._ready.put_nowait(None)
        raise NetworkError("The listener was closed", where=where)

    async def close(self) -> None:
        """Drop whoever was not accepted; channels that were accepted stay. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        dropped = list(self.unfinished)
        for channel in dropped:
            channel.cut()
        while not self._ready.empty():
            if (waiting := self._ready.get_nowait()) is not None:
                dropped.append(waiting)
        self._ready.put_nowait(None)
        await asyncio.gather(*(channel.close() for channel in dropped))

    def _settled(self, channel: StreamChannel) -> None:
        self.forget(channel)
        if channel.error is None and self.closed:  # its connection came about after the end
            channel.cut()
        elif channel.error is None:
            self._ready.put_nowait(channel)
        elif not self.closed:
            _log.warning("A peer was not admitted: %s", channel.error)

    def _too_slow(self, channel: StreamChannel) -> None:
        expected = f"{self._handshake_s:g} s at most"
        channel.refuse(ProtocolError("The handshake was not finished in time", where=channel.peer, expected=expected))
