"""One channel of the star with a heartbeat: messages out, messages in, and an end that is always noticed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from splitlm.core import messages
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Said

HEARTBEAT_S = 2.0
TIMEOUT_S = 10.0
BEATS = TIMEOUT_S / HEARTBEAT_S
"""Heartbeats due within a timeout: a few may be late before a peer counts as lost."""

Heard = Callable[[messages.Any], Awaitable[None]]
Ended = Callable[[NetworkError, float], Awaitable[None]]


class Line:
    """Owns a channel and the two tasks that read it and keep it alive. To be made in a running event loop.

    Args:
        channel: a control channel.
        heard: awaited for every message but heartbeats, in order.
        ended: awaited once, after the last message, with the reason and the seconds since the peer was last heard; not
            after ``close``. The channel then closes by itself.
        heartbeat_s: seconds of our own silence after which a Ping is sent.
        timeout_s: seconds of the peer's silence after which it counts as lost; any message is a sign of life.
    """

    def __init__(self, channel: Channel, heard: Heard, ended: Ended, heartbeat_s: float, timeout_s: float) -> None:
        self.channel = channel
        self._heard, self._ended = heard, ended
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._loop = asyncio.get_running_loop()
        self._said_at = self._heard_at = self._loop.time()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]

    @property
    def finished(self) -> bool:
        """Whether nothing of this line is left to wait for."""
        return all(task.done() for task in self._tasks)

    async def send(self, message: messages.Message) -> None:
        """Send one message.

        Raises:
            PeerLostError: the peer is gone.
            ProtocolError: the message is too large.
        """
        self._said_at = self._loop.time()
        await self.channel.send(Said(messages.encode(message)))

    async def close(self) -> None:
        """End the tasks and the channel; what was sent before still arrives. Not to be called from ``heard``."""
        try:
            await cancel(*self._tasks)
        finally:
            await self.channel.close()

    async def _read(self) -> None:
        try:
            while True:
                message = await self._next()
                if not isinstance(message, messages.Ping):
                    await self._heard(message)
        except NetworkError as error:
            self._tasks[1].cancel()
            await self._ended(error, self._loop.time() - self._heard_at)
            await self.channel.close()

    async def _next(self) -> messages.Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                frame = await self.channel.receive()
        except TimeoutError:
            raise PeerLostError(
                f"The peer was silent for {self._timeout_s:g} s",
                where=self.channel.peer,
                expected=f"a sign of life every {self._heartbeat_s:g} s",
                remedy="Check that its process runs and that the network carries both ways",
            ) from None
        self._heard_at = self._loop.time()
        header = frame.header
        frame.release()
        if not isinstance(header, Said):
            raise ProtocolError(
                f"A {type(header).__name__} frame came on the control plane", where=self.channel.peer, expected="Said"
            )
        return messages.decode(header.message, self.channel.peer)

    async def _beat(self) -> None:
        try:
            while True:
                due = self._said_at + self._heartbeat_s - self._loop.time()
                if due > 0:
                    await asyncio.sleep(due)
                else:
                    await self.send(messages.Ping())
        except NetworkError:
            return  # the reader learns it too, and tells


async def cancel(*tasks: asyncio.Task[None]) -> None:
    """End tasks of ours and wait for them; what failed in one for another reason is raised, not lost."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result
