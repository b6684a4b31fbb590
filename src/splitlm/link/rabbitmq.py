"""Channels through a RabbitMQ broker, for comparison with TCP's: the same channel, over a pipe of messages.

A listener has a queue under a name that diallers know; each link then has two of its own (link/pipe.py). A broker that
goes takes all links with it.
"""

from __future__ import annotations

import asyncio
import contextlib

from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import DeliveryError, PublishError

from splitlm.core.errors import NetworkError, PeerLostError, PeerMissingError, ProtocolError
from splitlm.link.base import StreamChannel
from splitlm.link.pipe import FAILURES, LAST_S, open_end, post
from splitlm.wire.handshake import Handshake, Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose

HANDSHAKE_S = 10.0
"""How long an arriving peer may take for its handshake."""
RETRY_S = 0.1
MAX_UNFINISHED = 32
"""Handshakes that may be under way at one listener; who comes meanwhile is not answered."""


class RabbitListener:
    """A ``Listener`` (wire/channel.py) at a queue. Made by ``listen``."""

    port = 0

    def __init__(
        self, connection: AbstractConnection, door: str, identity: Identity, purpose: Purpose, pool: BufferPool | None
    ) -> None:
        self.host = door
        self._connection, self._identity, self._purpose, self._pool = connection, identity, purpose, pool
        self._amqp: AbstractChannel | None = None
        self._ready: asyncio.Queue[StreamChannel | None] = asyncio.Queue()
        self._unfinished: dict[StreamChannel, asyncio.TimerHandle] = {}
        self._closed = False

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
        channel = await self._ready.get()
        if channel is None:
            self._ready.put_nowait(None)
            raise NetworkError("The listener was closed", where=self.host)
        return channel

    async def close(self) -> None:
        """Stop listening; channels that were accepted stay."""
        if self._closed:
            return
        self._closed = True
        dropped = list(self._unfinished)
        while not self._ready.empty():
            if (waiting := self._ready.get_nowait()) is not None:
                dropped.append(waiting)
        self._ready.put_nowait(None)
        await asyncio.gather(*(channel.close() for channel in dropped))
        if self._amqp is not None:
            with contextlib.suppress(TimeoutError, *FAILURES):
                async with asyncio.timeout(LAST_S):
                    await self._amqp.close()

    async def _dialled(self, message: AbstractIncomingMessage) -> None:
        to = message.reply_to
        if not to or self._closed or len(self._unfinished) >= MAX_UNFINISHED:
            return
        channel = StreamChannel(
            "listener",
            self._purpose,
            to,
            self._pool or BufferPool(),
            handshake=Handshake("listener", self._purpose, self._identity, to),
            on_settled=self._settled,
        )
        expected = f"{HANDSHAKE_S:g} s at most"
        slow = ProtocolError("The handshake was not finished in time", where=to, expected=expected)
        self._unfinished[channel] = asyncio.get_running_loop().call_later(HANDSHAKE_S, channel.refuse, slow)
        try:
            transport = await open_end(self._connection, channel, self.host)
            transport.start(to)
            await post(transport.amqp, to, "met", reply_to=transport.queue)
        except FAILURES:  # it is gone again, or the broker is
            channel.cut()
            self._unfinished.pop(channel).cancel()

    def _settled(self, channel: StreamChannel) -> None:
        if (timer := self._unfinished.pop(channel, None)) is not None:
            timer.cancel()
        if channel.error is None:
            self._ready.put_nowait(channel)


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
