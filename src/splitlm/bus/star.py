"""The embedded star: a hub over a listener, spokes over channels. Both are injected; this room opens no socket."""

from __future__ import annotations

import asyncio
from itertools import count

from splitlm.bus.base import Event, PeerCame, PeerGone
from splitlm.bus.inbox import Inbox
from splitlm.bus.line import HEARTBEAT_S, TIMEOUT_S, Line, cancel
from splitlm.core import messages
from splitlm.core.errors import NetworkError, PeerLostError
from splitlm.wire.channel import Channel, Listener

MAX_WAITING = 1024
"""Events that wait to be received before the hub stops reading from its peers."""


class StarHub:
    """A ``Hub`` (bus/base.py). To be made in a running event loop; owns the listener and all channels it accepts."""

    def __init__(self, listener: Listener, *, heartbeat_s: float = HEARTBEAT_S, timeout_s: float = TIMEOUT_S) -> None:
        self._listener = listener
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._lines: dict[str, Line] = {}
        self._hosts: dict[str, str] = {}
        self._parted: list[Line] = []
        self._events: asyncio.Queue[tuple[str, Event] | None] = asyncio.Queue(MAX_WAITING)
        self._closed = False
        self._arrivals = asyncio.create_task(self._accept())

    async def receive(self) -> tuple[str, Event]:
        """The next event of any peer.

        Raises:
            NetworkError: the hub was closed.
        """
        while not self._closed:
            item = await self._events.get()
            if item is None or item[0] not in self._lines:
                continue  # the hub was closed, or the peer was dropped after it had said this
            peer, event = item
            if isinstance(event, PeerGone):
                self._part(peer)
            return peer, event
        raise NetworkError("The hub was closed", where=self._listener.host)

    async def send(self, peer: str, message: messages.Message) -> None:
        """Say something to one peer.

        Raises:
            PeerLostError: it is gone.
            ProtocolError: the message is too large.
        """
        line = self._lines.get(peer)
        if line is None:
            raise PeerLostError(f"Peer {peer} is gone", where=self._hosts.get(peer, ""))
        await line.send(message)

    def address(self, peer: str) -> str:
        """The peer's host as seen from the hub.

        Raises:
            PeerLostError: there never was such a peer.
        """
        if peer not in self._hosts:
            raise PeerLostError(f"There is no peer {peer}")
        return self._hosts[peer]

    async def drop(self, peer: str) -> None:
        """Part from a peer; nothing more is received of it."""
        line = self._lines.pop(peer, None)
        if line is not None:
            await line.close()

    async def close(self) -> None:
        """Part from all peers, after what was sent."""
        if self._closed:
            return
        self._closed = True
        await cancel(self._arrivals)
        await self._listener.close()
        lines = [*self._lines.values(), *self._parted]
        self._lines.clear()
        self._parted.clear()
        await asyncio.gather(*(line.close() for line in lines))
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)

    async def _accept(self) -> None:
        for number in count(1):
            try:
                channel = await self._listener.accept()
            except NetworkError:
                return  # the listener was closed
            peer = f"{channel.claims.node}#{number}"
            self._hosts[peer] = channel.host
            try:
                await self._events.put((peer, PeerCame(channel.claims.node, channel.host)))
            except asyncio.CancelledError:
                await channel.close()
                raise
            self._lines[peer] = self._line(peer, channel)

    def _line(self, peer: str, channel: Channel) -> Line:
        async def heard(message: messages.Any) -> None:
            await self._events.put((peer, message))

        async def ended(error: NetworkError, silent_s: float) -> None:
            await self._events.put((peer, PeerGone(channel.claims.node, str(error), silent_s)))

        return Line(channel, heard, ended, self._heartbeat_s, self._timeout_s)

    def _part(self, peer: str) -> None:
        """Forget a peer whose end was told; its line finishes closing by itself."""
        self._parted = [line for line in self._parted if not line.finished]
        self._parted.append(self._lines.pop(peer))


class StarSpoke:
    """A ``Spoke`` (bus/base.py) over one channel, which it owns. To be made in a running event loop."""

    def __init__(self, channel: Channel, *, heartbeat_s: float = HEARTBEAT_S, timeout_s: float = TIMEOUT_S) -> None:
        self._inbox = Inbox(MAX_WAITING)
        self._line = Line(channel, self._inbox.put, self._lost, heartbeat_s, timeout_s)

    @property
    def hub_host(self) -> str:
        """The hub's host as seen from here."""
        return self._line.channel.host

    async def send(self, message: messages.Message) -> None:
        """Say something to the hub.

        Raises:
            PeerLostError: the hub is gone.
            ProtocolError: the message is too large.
        """
        await self._line.send(message)

    async def receive(self) -> messages.Any:
        """The hub's next message.

        Raises:
            PeerLostError: the hub is gone, or was silent for too long.
            ProtocolError: the hub sent what is not a message.
        """
        return await self._inbox.receive()

    async def close(self) -> None:
        """Leave."""
        await self._line.close()
        self._inbox.shut(PeerLostError("The line was closed by this side", where=self._line.channel.peer))

    async def _lost(self, error: NetworkError, _silent_s: float) -> None:
        await self._inbox.put(error)
