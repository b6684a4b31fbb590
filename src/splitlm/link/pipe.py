"""A pipe of messages through a RabbitMQ broker: the asyncio transport under the channels of link/rabbitmq.py.

A link has a queue for each of its ends. A stream's bytes travel in messages of at most ``CHUNK`` bytes; no more than
``WINDOW`` of them wait for an end that takes none, by credit that the end itself gives.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets

import aio_pika
from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
from aio_pika.exceptions import CONNECTION_EXCEPTIONS, AMQPError, DeliveryError, PublishError

from splitlm.link.base import StreamChannel
from splitlm.link.reading import ReadingHalf

CHUNK = 128 * 1024
WINDOW = 8
"""Messages of one direction that were sent and not taken yet."""
BEAT_S = 5.0
"""Who has nothing to say says so: the broker then tells whether the other end is still there."""
LAST_S = 1.0
"""How long the last words may take."""
FAILURES = (PublishError, DeliveryError, AMQPError, *CONNECTION_EXCEPTIONS)


class QueueTransport(ReadingHalf):
    """One end of a link. Made by ``open_end``; ``start`` joins it to the other end's queue.

    Its one task writes; it ends with ``connection_lost``.
    """

    def __init__(self, amqp: AbstractChannel, queue: str, protocol: StreamChannel) -> None:
        super().__init__(protocol, {"peername": ("rabbitmq", 0), "sockname": ("rabbitmq", 0)})
        self.amqp, self.queue, self.met = amqp, queue, asyncio.Event()
        self._to = ""
        self._outgoing = bytearray()
        self._credit = WINDOW
        self._due = asyncio.Event()
        self._full = self._ended = self._leaving = False
        self._error: Exception | None = None
        self._writer: asyncio.Task[None] | None = None
        amqp.close_callbacks.add(lambda *_: self._fail("the broker was lost"))

    def start(self, to: str) -> None:
        """The other end's queue is known: begin."""
        self._to = to
        self._writer = asyncio.create_task(self._write())
        self._protocol.connection_made(self)

    # What the channel calls.

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """The pipe has one size: what a window takes."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Put bytes into the pipe; they are copied."""
        if self._closing or self._ended:
            return
        self._outgoing += data
        if len(self._outgoing) > CHUNK and not self._full:
            self._full = True
            self._protocol.pause_writing()
        self._due.set()

    def get_write_buffer_size(self) -> int:
        """Bytes that were not sent yet."""
        return len(self._outgoing)

    def can_write_eof(self) -> bool:
        """Always."""
        return True

    def write_eof(self) -> None:
        """Nothing follows."""
        self._ended = True
        self._due.set()

    def close(self) -> None:
        """End this side, after what was written."""
        self._ended = self._closing = True
        self._due.set()

    def abort(self) -> None:
        """End this side at once."""
        self._closing = True
        self._outgoing.clear()
        if self._writer is not None and not self._leaving:
            self._leaving = True
            self._writer.cancel()

    # What the broker brings.

    async def came(self, message: AbstractIncomingMessage) -> None:
        """One message of our queue."""
        match message.type:
            case "data" if len(self._inbound) < WINDOW and message.body:
                self._hold(memoryview(message.body))
            case "data":
                self._fail("it sent more than it may")
            case "took" if (
                len(message.body) < 3 and message.body.isdigit() and self._credit + int(message.body) <= WINDOW
            ):
                self._credit += int(message.body)
                self._due.set()
            case "took":
                self._fail("it took more than there was")
            case "end":
                self._inbound_ended = True
            case "met" if not self._to and message.reply_to:
                self._to = message.reply_to
                self.met.set()
            case _:
                return  # a sign of life
        self._schedule()

    @property
    def to(self) -> str:
        """The other end's queue, once ``met``."""
        return self._to

    def _fail(self, how: str) -> None:
        if self._error is None and not self._closing:
            self._error = ConnectionResetError(how)
            self.abort()

    def _read_on(self) -> None:
        if self._took:  # else the writer has nothing to tell of
            self._due.set()

    # The writer.

    async def _write(self) -> None:
        try:
            try:
                await self._write_on()
            except (PublishError, DeliveryError):
                await self._read_out()
        except FAILURES:
            self._error = self._error or ConnectionResetError("the broker was lost")
        except asyncio.CancelledError:
            if not self._closing:
                raise
        finally:
            self._closing = self._leaving = True
            await self._leave()
            self._protocol.connection_lost(self._error)

    async def _write_on(self) -> None:
        ended = False
        while not (self._closing and ended):
            if self._took:
                took, self._took = self._took, 0
                await self._say("took", str(took).encode())
            elif self._outgoing and self._credit:
                self._credit -= 1
                chunk = bytes(memoryview(self._outgoing)[:CHUNK])
                del self._outgoing[: len(chunk)]
                await self._say("data", chunk)
                if self._full and len(self._outgoing) <= CHUNK:
                    self._full = False
                    self._protocol.resume_writing()
            elif self._ended and not self._outgoing and not ended:
                ended = True
                await self._say("end")
            else:
                await self._wait()

    async def _read_out(self) -> None:
        """The other end is gone: what it sent before is still delivered."""
        self._ended = self._inbound_ended = True
        self._outgoing.clear()
        if self._full:
            self._full = False
            self._protocol.resume_writing()
        self._schedule()
        while not self._closing:
            self._due.clear()
            await self._due.wait()

    async def _wait(self) -> None:
        """Until there is something to do; a sign of life where nothing is for long."""
        self._due.clear()
        try:
            async with asyncio.timeout(BEAT_S):
                await self._due.wait()
        except TimeoutError:
            await self._say("beat")

    async def _say(self, kind: str, body: bytes = b"") -> None:
        await post(self.amqp, self._to, kind, body)

    async def _leave(self) -> None:
        """Tell the other end, and give the queue back; nobody waits long for a broker that does not answer."""
        with contextlib.suppress(TimeoutError, *FAILURES):
            async with asyncio.timeout(LAST_S):
                if not self.amqp.is_closed:
                    await self._say("end")
                await self.amqp.close()


async def post(amqp: AbstractChannel, to: str, kind: str, body: bytes = b"", reply_to: str = "") -> None:
    """One message; returns once the broker has it.

    Raises:
        DeliveryError, PublishError: there is no such queue.
    """
    message = aio_pika.Message(body, type=kind, reply_to=reply_to or None, app_id="splitlm")
    await amqp.default_exchange.publish(message, routing_key=to, mandatory=True)


async def open_end(connection: AbstractConnection, channel: StreamChannel, door: str) -> QueueTransport:
    """An end with a queue of its own, which goes with the connection."""
    amqp = await connection.channel(publisher_confirms=True, on_return_raises=True)
    name = f"{door}.{secrets.token_hex(8)}"
    queue = await amqp.declare_queue(name, exclusive=True, auto_delete=True)
    transport = QueueTransport(amqp, name, channel)
    await queue.consume(transport.came, no_ack=True)
    return transport
