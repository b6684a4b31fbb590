"""A node's way to the hub through a RabbitMQ broker; see bus/rabbitmq.py."""

from __future__ import annotations

import asyncio
import secrets

from splitlm.bus.address import Address
from splitlm.bus.broker import OUTAGE_S, Broker
from splitlm.bus.half import Half, flushed, silence
from splitlm.bus.inbox import Inbox
from splitlm.bus.letter import Letter, hub_queue, spoke_queue
from splitlm.bus.line import HEARTBEAT_S, TIMEOUT_S, cancel
from splitlm.bus.star import MAX_WAITING
from splitlm.core import messages
from splitlm.core.errors import NetworkError, PeerLostError, PeerMissingError, ProtocolError

HELLO_S = 1.0
"""Pause between two hellos while the hub does not answer."""
DEADLINE_S = 60.0


class RabbitSpoke:
    """A ``Spoke`` (bus/base.py). Made by ``open``."""

    def __init__(
        self, address: Address, run: str, name: str, host: str, heartbeat_s: float, timeout_s: float, outage_s: float
    ) -> None:
        self._address, self._run, self._name, self._host = address, run, name, host
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._loop = asyncio.get_running_loop()
        number, now = secrets.token_hex(8), self._loop.time()
        self._half = Half(number, hub_queue(run), now, now)
        self._broker = Broker(address, spoke_queue(run, name, number), self._heard, self._end, outage_s)
        self._inbox = Inbox(MAX_WAITING)
        self._welcomed: asyncio.Future[str] = self._loop.create_future()
        self._error: NetworkError | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        where: Address,
        run: str,
        name: str,
        host: str,
        *,
        deadline_s: float = DEADLINE_S,
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
        outage_s: float = OUTAGE_S,
    ) -> RabbitSpoke:
        """Join the hub of a run, and wait for it while it is not up yet; see ``RabbitHub.open``.

        Args:
            where: the broker.
            run: its name.
            name: what this node calls itself.
            host: what others are to call this machine.
            deadline_s: how long to wait for the hub.

        Raises:
            UsageError: run or node have no name, or a long one.
            PeerMissingError: the hub did not answer before the deadline, or there is no broker.
            NetworkError: the broker does not let us in.
        """
        spoke = cls(where, run, name, host, heartbeat_s, timeout_s, outage_s)
        await spoke._broker.open()
        try:
            await spoke._join(deadline_s)
        except BaseException:
            await spoke._broker.close()
            raise
        spoke._tasks = [asyncio.create_task(spoke._tend())]
        return spoke

    @property
    def hub_host(self) -> str:
        """The hub's host, as it calls itself."""
        return self._welcomed.result()

    async def send(self, message: messages.Message) -> None:
        """Say something to the hub.

        Raises:
            PeerLostError: the hub is gone, or the broker is.
            ProtocolError: the message is too large.
        """
        data = messages.encode(message)
        if self._error is not None:
            raise self._error
        letter = self._half.next("say", self._loop.time())
        if not await asyncio.shield(self._broker.post(self._half.queue, letter, data)):
            error = PeerLostError(f"The hub of run {self._run} is gone", where=str(self._address))
            await self._end(error)
            raise error

    async def receive(self) -> messages.Any:
        """The hub's next message.

        Raises:
            PeerLostError: the hub is gone, or was silent for too long.
            ProtocolError: the hub sent what is not a message.
        """
        return await self._inbox.receive()

    async def close(self) -> None:
        """Leave."""
        first = self._error is None
        if self._error is None:
            self._error = PeerLostError("The line was closed by this side", where=str(self._address))
        tasks, self._tasks = self._tasks, []
        await cancel(*tasks)
        if first:
            await flushed(self._broker.post(self._half.queue, self._half.next("bye", self._loop.time())))
        await self._broker.close()
        self._inbox.shut(self._error)

    async def _join(self, deadline_s: float) -> None:
        try:
            async with asyncio.timeout(deadline_s):
                while not self._welcomed.done():
                    hello = Letter(kind="hello", peer=self._half.peer, name=self._name, host=self._host)
                    await asyncio.shield(self._broker.post(self._half.queue, hello))
                    await asyncio.wait({self._welcomed}, timeout=HELLO_S)
        except TimeoutError:
            raise PeerMissingError(
                f"{self._name} waited {deadline_s:g} s for the hub of run {self._run} at the broker",
                where=str(self._address),
                remedy="Check that the coordinator was started, with the same name, broker and virtual host",
            ) from None

    async def _heard(self, letter: Letter, body: bytes) -> None:
        if letter.peer != self._half.peer or self._error is not None:
            return
        self._half.heard_at = self._loop.time()
        if letter.kind == "welcome" and not self._welcomed.done():
            self._welcomed.set_result(letter.host)
        if not letter.lasting:
            return
        try:
            if not self._half.heard.new(letter, str(self._address)):
                return
            if letter.kind == "bye":
                await self._end(PeerLostError("The hub went away", where=str(self._address)))
            else:
                await self._inbox.put(messages.decode(body, str(self._address)))
        except ProtocolError as error:
            await self._end(error)

    async def _end(self, error: NetworkError) -> None:
        """Hear and say nothing more; what was heard before can still be received."""
        if self._error is None:
            self._error = error
            await self._inbox.put(error)

    async def _tend(self) -> None:
        """Tell the hub that we live, and notice when it does not."""
        while self._error is None:
            await asyncio.sleep(min(self._heartbeat_s / 2, self._timeout_s / 4))
            now = self._loop.time()
            if not self._broker.up:
                continue
            silent_s = self._half.silent_s(now, self._broker.up_since)
            if self._broker.listening and silent_s > self._timeout_s:
                await self._end(silence(f"the hub of run {self._run}", self._timeout_s, self._heartbeat_s))
            elif now - self._half.said_at >= self._heartbeat_s:
                self._half.said_at = now
                self._broker.post(self._half.queue, Letter(kind="beat", peer=self._half.peer))
