"""A star inside one process, for tests: the contract of bus/base.py without channels, heartbeats or tasks.

Messages are encoded and decoded as on the wire, so that what cannot travel cannot be tested by accident.
"""

from __future__ import annotations

import asyncio
from itertools import count

from splitlm.bus.base import Event, PeerCame, PeerGone
from splitlm.bus.inbox import Inbox
from splitlm.core import messages
from splitlm.core.errors import NetworkError, PeerLostError


class MemoryHub:
    """A ``Hub`` (bus/base.py); nodes come with ``join``."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._spokes: dict[str, MemorySpoke] = {}
        self._hosts: dict[str, str] = {}
        self._events: asyncio.Queue[tuple[str, Event] | None] = asyncio.Queue()
        self._closed = False

    def join(self, name: str, host: str = "memory") -> MemorySpoke:
        """A new spoke, as if a node called ``name`` had dialled from ``host``.

        Raises:
            NetworkError: the hub was closed.
        """
        if self._closed:
            raise NetworkError("The hub was closed", where="memory")
        peer = f"{name}#{next(self._numbers)}"
        self._hosts[peer] = host
        spoke = self._spokes[peer] = MemorySpoke(self, peer, name)
        self.tell(peer, PeerCame(name, host))
        return spoke

    async def receive(self) -> tuple[str, Event]:
        """The next event of any peer.

        Raises:
            NetworkError: the hub was closed.
        """
        while not self._closed:
            item = await self._events.get()
            if item is None or item[0] not in self._spokes:
                continue
            if isinstance(item[1], PeerGone):
                del self._spokes[item[0]]
            return item
        raise NetworkError("The hub was closed", where="memory")

    async def send(self, peer: str, message: messages.Message) -> None:
        """Say something to one peer.

        Raises:
            PeerLostError: it is gone.
            ProtocolError: the message is too large.
        """
        data = messages.encode(message)
        spoke = self._spokes.get(peer)
        if spoke is None or spoke.gone:
            raise PeerLostError(f"Peer {peer} is gone", where=self._hosts.get(peer, ""))
        spoke.tell(messages.decode(data))

    def address(self, peer: str) -> str:
        """The peer's host, as it was given to ``join``.

        Raises:
            PeerLostError: there never was such a peer.
        """
        if peer not in self._hosts:
            raise PeerLostError(f"There is no peer {peer}")
        return self._hosts[peer]

    async def drop(self, peer: str) -> None:
        """Part from a peer; nothing more is received of it."""
        spoke = self._spokes.pop(peer, None)
        if spoke is not None:
            spoke.end(PeerLostError("The hub went away", where="memory"))

    async def close(self) -> None:
        """Part from all peers."""
        self._closed = True
        for peer in list(self._spokes):
            await self.drop(peer)
        self._events.put_nowait(None)

    def tell(self, peer: str, event: Event) -> None:
        """Queue an event of one peer."""
        self._events.put_nowait((peer, event))


class MemorySpoke:
    """A ``Spoke`` (bus/base.py). Made by ``MemoryHub.join``."""

    hub_host = "memory"

    def __init__(self, hub: MemoryHub, peer: str, name: str) -> None:
        self.peer = peer
        self.gone = False
        self._hub, self._name = hub, name
        self._inbox = Inbox()

    async def send(self, message: messages.Message) -> None:
        """Say something to the hub.

        Raises:
            PeerLostError: the hub is gone.
            ProtocolError: the message is too large.
        """
        data = messages.encode(message)
        if self.gone:
            raise PeerLostError("The hub is gone", where="memory")
        self._hub.tell(self.peer, messages.decode(data))

    async def receive(self) -> messages.Any:
        """The hub's next message.

        Raises:
            PeerLostError: the hub is gone.
        """
        return await self._inbox.receive()

    async def close(self) -> None:
        """Leave."""
        self.vanish("The peer went away")

    def vanish(self, reason: str, silent_s: float = 0.0) -> None:
        """Be lost to the hub for this reason: how tests play a killed or silent node."""
        if not self.gone:
            self._hub.tell(self.peer, PeerGone(self._name, reason, silent_s))
            self.gone = True
            self._inbox.shut(PeerLostError("The line was closed by this side", where="memory"))

    def tell(self, message: messages.Any) -> None:
        """Queue a message of the hub."""
        self._inbox.put_now(message)

    def end(self, error: NetworkError) -> None:
        """Receive nothing after what is queued, then this error."""
        self.gone = True
        self._inbox.put_now(error)
