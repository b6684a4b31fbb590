"""One process's connection to a RabbitMQ broker: one queue of its own, messages out in order, and a way back when the
broker was lost.

A message counts as sent when the broker has confirmed it, and as received when it was acknowledged. What was under way
when the connection broke is sent again, and may come twice: letters have numbers (bus/letter.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import aio_pika
from aio_pika.exceptions import CONNECTION_EXCEPTIONS, DeliveryError, PublishError

from splitlm.bus.address import CONNECT_S, Address, connect, refused
from splitlm.bus.letter import Letter, read
from splitlm.bus.line import cancel
from splitlm.core.errors import NetworkError, PeerLostError, PeerMissingError, ProtocolError

RETRY_S = (0.1, 2.0)
"""First and longest pause between two attempts to come back to the broker; each is drawn from its half up."""
OUTAGE_S = 120.0
"""How long a broker may be away before it counts as lost."""
EXPIRES_MS = 10 * 60 * 1000
"""A queue that nobody has used for so long goes by itself: what a killed process left behind."""
PREFETCH = 64
STALL_S = 0.1
"""Who was kept from listening for longer counts the silence of others from then on."""
CLOSE_S = 3.0
_log = logging.getLogger("splitlm.bus")


class Broker:
    """Made by ``open``, in a running event loop.

    Args:
        queue: our own; what comes there is given to ``heard``, one by one.
        failed: awaited once, where the broker does not come back.
    """

    def __init__(
        self,
        address: Address,
        queue: str,
        heard: Callable[[Letter, bytes], Awaitable[None]],
        failed: Callable[[NetworkError], Awaitable[None]],
        outage_s: float = OUTAGE_S,
    ) -> None:
        self.up_since = 0.0
        self._address, self._queue, self._heard, self._failed = address, queue, heard, failed
        self._outage_s = outage_s
        self._loop = asyncio.get_running_loop()
        self._hearing = False
        self._up = asyncio.Event()
        self._lost = asyncio.Event()
        self._error: NetworkError | None = None
        self._connection: aio_pika.abc.AbstractConnection | None = None
        self._channel: aio_pika.abc.AbstractChannel | None = None
        self._incoming: asyncio.Queue[tuple[aio_pika.abc.AbstractIncomingMessage, asyncio.Event]] = asyncio.Queue()
        self._outgoing: asyncio.Queue[tuple[str, aio_pika.Message, asyncio.Future[bool]]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def up(self) -> bool:
        """Whether the connection stands."""
        return self._up.is_set() and not self._lost.is_set()

    @property
    def listening(self) -> bool:
        """Whether silence tells of a peer: not while the broker is away, or while nobody takes what came."""
        return self.up and not self._hearing

    async def open(self) -> None:
        """Connect, and begin with an empty queue of our own: what an earlier run of this name left there goes.

        Raises:
            PeerMissingError: no broker is there.
            PeerRefusedError: it does not let us in.
            AddressBusyError: another process uses our queue.
        """
        try:
            await self._dial(fresh=True)
        except BaseException:
            await self._part()
            raise
        self._tasks = [asyncio.create_task(work()) for work in (self._keep, self._write, self._read)]

    def post(self, queue: str, letter: Letter, body: bytes = b"") -> asyncio.Future[bool]:
        """Send one letter after those before it; True once the broker has it, False where there is no such queue.

        The future raises a PeerLostError where the broker does not come back.
        """
        done: asyncio.Future[bool] = self._loop.create_future()
        done.add_done_callback(_seen)
        if self._error is not None:
            done.set_exception(self._error)
            return done
        mode = aio_pika.DeliveryMode.PERSISTENT if letter.lasting else aio_pika.DeliveryMode.NOT_PERSISTENT
        message = aio_pika.Message(body, headers=letter.headers(), delivery_mode=mode, app_id="splitlm")
        self._outgoing.put_nowait((queue, message, done))
        return done

    async def forget(self, queue: str) -> None:
        """Delete a queue of this run."""
        channel, lost = self._channel, self._lost
        if channel is not None and self.up:
            await _unless(lost, channel.queue_delete(queue))

    async def close(self) -> None:
        """Delete our queue and leave; what was posted and not awaited is dropped."""
        await cancel(*self._tasks)
        self._error = self._error or PeerLostError("The bus was closed by this side", where=str(self._address))
        self._drop_outgoing(self._error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self.forget(self._queue)
        await self._part()

    async def _dial(self, *, fresh: bool) -> None:
        """One connection, with our queue and its consumer."""
        where, lost = self._address, asyncio.Event()

        def broke(*_: Any) -> None:
            lost.set()

        async def came(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            self._incoming.put_nowait((message, lost))

        try:
            async with asyncio.timeout(CONNECT_S):
                connection = self._connection = await connect(where, self._queue)
                connection.close_callbacks.add(broke)
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                channel.close_callbacks.add(broke)
                await channel.set_qos(prefetch_count=PREFETCH)
                if fresh:
                    await channel.queue_delete(self._queue, if_unused=True)
                queue = await channel.declare_queue(self._queue, durable=True, arguments={"x-expires": EXPIRES_MS})
                queue.close_callbacks.add(broke)
                await queue.consume(came)
        except TimeoutError:
            raise PeerMissingError(
                f"The broker did not answer within {CONNECT_S:g} s", where=str(where), expected="RabbitMQ"
            ) from None
        except CONNECTION_EXCEPTIONS as error:
            raise refused(error, where) from None
        self._channel, self._lost = channel, lost
        self.up_since = self._loop.time()
        self._up.set()

    async def _keep(self) -> None:
        """Come back whenever the connection was lost."""
        while True:
            await self._lost.wait()
            self._up.clear()
            _log.warning("%s: the connection to the broker was lost; trying again", self._address)
            until, pause = self._loop.time() + self._outage_s, RETRY_S[0]
            while not self._up.is_set():
                await self._part()
                try:
                    await self._dial(fresh=False)
                except NetworkError as error:
                    if self._loop.time() > until:
                        await self._give_up(error)
                        return
                    await asyncio.sleep(pause * random.uniform(0.5, 1))  # so that not all come at once
                    pause = min(2 * pause, RETRY_S[1])
            _log.warning("%s: the broker is back", self._address)

    async def _give_up(self, error: NetworkError) -> None:
        self._error = PeerLostError(
            f"The broker was lost and did not come back within {self._outage_s:g} s ({error.what})",
            where=str(self._address),
            remedy="Start it again; the run can be resumed",
        )
        self._drop_outgoing(self._error)
        await self._failed(self._error)

    def _drop_outgoing(self, error: NetworkError) -> None:
        while not self._outgoing.empty():
            _, _, done = self._outgoing.get_nowait()
            if not done.done():
                done.set_exception(error)

    async def _write(self) -> None:
        while True:
            queue, message, done = await self._outgoing.get()
            try:
                delivered = await self._publish(queue, message)
            except BaseException:
                done.cancel()
                raise
            if not done.done():
                done.set_result(delivered)

    async def _publish(self, queue: str, message: aio_pika.Message) -> bool:
        """Until the broker has it or says that there is no such queue, over as many connections as that takes."""
        while True:
            await self._up.wait()
            channel, lost = self._channel, self._lost
            if channel is None:
                continue
            sent = channel.default_exchange.publish(message, routing_key=queue, mandatory=True)
            match await _unless(lost, sent):
                case None if not lost.is_set():
                    return True
                case PublishError():
                    return False
                case DeliveryError():  # it has no room for it now
                    await asyncio.sleep(RETRY_S[0])
                case _:  # whether it has it is not known
                    lost.set()
                    self._up.clear()

    async def _read(self) -> None:
        while True:
            message, lost = await self._incoming.get()
            began = self._loop.time()
            try:
                letter = read(message.headers)
            except ProtocolError as error:
                _log.warning("%s: %s", self._address, error)
            else:
                self._hearing = True
                await self._heard(letter, message.body)
                self._hearing = False
                if self._loop.time() - began > STALL_S:
                    self.up_since = self._loop.time()
            if not lost.is_set():  # else it comes again, and is known by its number
                await _unless(lost, message.ack())

    async def _part(self) -> None:
        """Leave the connection at hand, whatever state it is in."""
        connection, self._connection, self._channel = self._connection, None, None
        if connection is not None:
            with contextlib.suppress(TimeoutError, *CONNECTION_EXCEPTIONS):
                async with asyncio.timeout(CLOSE_S):
                    await connection.close()


async def _unless(lost: asyncio.Event, work: Coroutine[Any, Any, Any]) -> BaseException | None:
    """Do this unless the connection is lost; what was raised.

    In a task of its own: the library cancels whoever waits on a connection that ends, and that must not look as if we
    had been cancelled ourselves.
    """
    doing, ending = asyncio.create_task(work), asyncio.create_task(lost.wait())
    try:
        await asyncio.wait({doing, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        doing.cancel()
        ending.cancel()
        await asyncio.wait({doing, ending})
    if doing.cancelled():
        return asyncio.CancelledError()
    return doing.exception()


def _seen(done: asyncio.Future[bool]) -> None:
    """Nobody has to wait for a letter."""
    if not done.cancelled():
        done.exception()
