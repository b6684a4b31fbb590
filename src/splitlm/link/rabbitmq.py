"""Channels through a RabbitMQ broker, for comparison with TCP's: the same channel, over a pipe of messages.

A listener has a queue under a name that diallers know; each link then has two of its own (link/pipe.py). A broker that
goes takes all links with it.
"""

from __future__ import annotations

import asyncio
import contextlib

from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import DeliveryError, PublishError

from splitlm.core.errors import NetworkError, PeerLostError, PeerMissingError
from splitlm.link.base import StreamChannel
from splitlm.link.lobby import Lobby
from splitlm.link.pipe import FAILURES, LAST_S, open_end, post
from splitlm.wire.handshake import Handshake, Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose

RETRY_S = 0.1


class RabbitListener:
    """A ``Listener`` (wire/channel.py) at a queue. Made by ``listen``."""

    port = 0

    def __init__(
        self, connection: AbstractConnection, door: str, identity: Identity, purpose: Purpose, pool: BufferPool | None
    ) -> None:
        self.host = door
        self._connection, self._lobby = connection, Lobby(identity, purpose, pool)
        self._amqp: AbstractChannel | None = None

    async def start(self) -> None:
        """Open the queue."""
        self._amqp = await self._connection.channel(publisher_confirms=True, on_return_raises=True)
        queue = await self._amqp.declare_queue(self.host, exclusive=True, auto_delete=True)
        await queue.consume(self._dialled, no_ack=True)

    async def accept(self) -> StreamChannel:
        """The next peer that passed the handshake.

        Raises:
            NetworkError: the listener was closed.
        """
        return await self._lobby.accept(self.host)

    async def close(self) -> None:
        """Stop listening; channels that were accepted stay."""
        if self._lobby.closed:
            return
        await self._lobby.close()
        if self._amqp is not None:
            with contextlib.suppress(TimeoutError, *FAILURES):
                async with asyncio.timeout(LAST_S):
                    await self._amqp.close()

    async def _dialled(self, message: AbstractIncomingMessage) -> None:
        to = message.reply_to
        if not to or (channel := self._lobby.admit(to)) is None:
            return
        try:
            transport = await open_end(self._connection, channel, self.host)
            transport.start(to)
            await post(transport.amqp, to, "met", reply_to=transport.queue)
        except FAILURES:  # it is gone again, or the broker is
            channel.cut()
            self._lobby.forget(channel)


async def listen(
    connection: AbstractConnection, door: str, identity: Identity, purpose: Purpose, *, pool: BufferPool | None = None
) -> RabbitListener:
    """Listen at a queue.

    Args:
        connection: to the broker; it stays the caller's.
        door: name of the queue.

    Raises:
        NetworkError: the broker refused.
    """
    listener = RabbitListener(connection, door, identity, purpose, pool)
    try:
        await listener.start()
    except FAILURES as error:
        raise NetworkError(f"The broker opens no queue ({' '.join(str(error).split())})", where=door) from None
    return listener


async def connect(
    connection: AbstractConnection,
    door: str,
    identity: Identity,
    purpose: Purpose,
    *,
    deadline_s: float,
    who: str,
    pool: BufferPool | None = None,
) -> StreamChannel:
    """Meet a listener, and wait for it while it is not there yet.

    Raises:
        PeerMissingError: the peer was not there before the deadline.
        NetworkError: the two sides do not agree, or the broker was lost.
    """
    try:
        async with asyncio.timeout(deadline_s):
            while True:
                channel = await _attempt(connection, door, identity, purpose, f"{who} at {door}", pool)
                if channel is not None:
                    return channel
                await asyncio.sleep(RETRY_S)
    except TimeoutError:
        raise PeerMissingError(
            f"{identity.claims.node} waited {deadline_s:g} s for {who} at the broker",
            where=door,
            remedy="Check that it was started, with the same broker and virtual host",
        ) from None
    except FAILURES as error:
        raise PeerLostError(f"The broker was lost ({' '.join(str(error).split())})", where=door) from None


async def _attempt(
    connection: AbstractConnection,
    door: str,
    identity: Identity,
    purpose: Purpose,
    where: str,
    pool: BufferPool | None,
) -> StreamChannel | None:
    """One link and its handshake; None where nobody listens yet."""
    channel = StreamChannel(
        "dialler", purpose, where, pool or BufferPool(), handshake=Handshake("dialler", purpose, identity, where)
    )
    transport = await open_end(connection, channel, door)
    started = False
    try:
        try:
            await post(transport.amqp, door, "dial", reply_to=transport.queue)
        except (PublishError, DeliveryError):
            return None
        await transport.met.wait()
        transport.start(transport.to)
        started = True
        await asyncio.wait({channel.settled})
    except asyncio.CancelledError:
        await channel.close()
        raise
    finally:
        if not started:
            with contextlib.suppress(*FAILURES):
                await transport.amqp.close()
    if channel.error is not None and not channel.admitted:
        await channel.close()
        raise channel.error
    return channel
