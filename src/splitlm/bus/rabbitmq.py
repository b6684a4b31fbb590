"""The control plane through a RabbitMQ broker: the contract of bus/base.py where nodes cannot reach each other.

Hub and spokes have a durable queue each, which only its owner reads. A spoke says hello until the hub welcomes it. Both
sides send a sign of life when they have nothing else to say; a side that cannot hear does not count the silence.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import count

from splitlm.bus.address import Address
from splitlm.bus.base import Event, PeerCame, PeerGone
from splitlm.bus.broker import OUTAGE_S, Broker
from splitlm.bus.half import Half, flushed, silence
from splitlm.bus.letter import Letter, hub_queue, spoke_queue
from splitlm.bus.line import HEARTBEAT_S, TIMEOUT_S, cancel
from splitlm.bus.rabbit_spoke import RabbitSpoke
from splitlm.bus.star import MAX_WAITING
from splitlm.core import messages
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError

__all__ = ["RabbitHub", "RabbitSpoke"]


@dataclass
class _Peer:
    """A spoke, as the hub knows it."""

    id: str
    name: str
    half: Half
    gone: bool = False


class RabbitHub:
    """A ``Hub`` (bus/base.py). Made by ``open``."""

    def __init__(
        self, address: Address, run: str, host: str, heartbeat_s: float, timeout_s: float, outage_s: float
    ) -> None:
        self.host = host
        """What spokes call this machine."""
        self._run, self._address = run, address
        self._heartbeat_s, self._timeout_s = heartbeat_s, timeout_s
        self._loop = asyncio.get_running_loop()
        self._broker = Broker(address, hub_queue(run), self._heard, self._failed, outage_s)
        self._numbers = count(1)
        self._peers: dict[str, _Peer] = {}
        self._by_number: dict[str, _Peer] = {}
        self._hosts: dict[str, str] = {}
        self._events: asyncio.Queue[tuple[str, Event] | None] = asyncio.Queue(MAX_WAITING)
        self._error: NetworkError | None = None
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        where: Address,
        run: str,
        host: str,
        *,
        heartbeat_s: float = HEARTBEAT_S,
        timeout_s: float = TIMEOUT_S,
        outage_s: float = OUTAGE_S,
    ) -> RabbitHub:
        """Be the hub of a run. Only this run's own queue is emptied; the broker's others are not touched.

        Args:
            where: the broker.
            run: its name, the same for all nodes.
            host: what spokes are to call this machine.
            outage_s: how long the broker may be away before it counts as lost.

        Raises:
            UsageError: the run has no name, or a long one.
            NetworkError: the broker is not there, does not let us in, or another process is this run's hub.
        """
        hub = cls(where, run, host, heartbeat_s, timeout_s, outage_s)
        await hub._broker.open()
        hub._tasks = [asyncio.create_task(hub._tend())]
        return hub

    async def receive(self) -> tuple[str, Event]:
        """The next event of any peer.

        Raises:
            NetworkError: the hub was closed, or the broker was lost for good.
        """
        while not self._closed:
            item = await self._events.get()
            if item is None:
                if self._error is None:
                    continue
                self._events.put_nowait(None)
                raise self._error
            if item[0] not in self._peers:
                continue  # it was dropped after it had said this
            if isinstance(item[1], PeerGone):
                self._forget(item[0])
            return item
        raise NetworkError("The hub was closed", where=str(self._address))

    async def send(self, peer: str, message: messages.Message) -> None:
        """Say something to one peer.

        Raises:
            PeerLostError: it is gone, or the broker is.
            ProtocolError: the message is too large.
        """
        data = messages.encode(message)
        known = self._peers.get(peer)
        if known is None or known.gone:
            raise PeerLostError(f"Peer {peer} is gone", where=self._hosts.get(peer, ""))
        letter = known.half.next("say", self._loop.time())
        if not await asyncio.shield(self._broker.post(known.half.queue, letter, data)):
            raise PeerLostError(f"Peer {peer} is gone, and its queue with it", where=self._hosts[peer])

    def address(self, peer: str) -> str:
        """The peer's host, as it calls itself.

        Raises:
            PeerLostError: there never was such a peer.
        """
        if peer not in self._hosts:
            raise PeerLostError(f"There is no peer {peer}")
        return self._hosts[peer]

    async def drop(self, peer: str) -> None:
        """Part from a peer; nothing more is received of it."""
        known = self._peers.get(peer)
        if known is not None:
            self._forget(peer)
            await self._bye(known)

    async def close(self) -> None:
        """Part from all peers, after what was sent."""
        if self._closed:
            return
        self._closed = True
        await cancel(*self._tasks)
        peers = list(self._peers.values())
        self._peers.clear()
        await asyncio.gather(*(self._bye(peer) for peer in peers))
        await self._broker.close()
        while not self._events.empty():
            self._events.get_nowait()
        self._events.put_nowait(None)

    async def _bye(self, peer: _Peer) -> None:
        if not peer.gone:
            peer.gone = True
            await flushed(self._broker.post(peer.half.queue, peer.half.next("bye", self._loop.time())))

    def _forget(self, peer: str) -> None:
        self._peers.pop(peer, None)  # its number stays known: a late letter makes no new peer

    async def _heard(self, letter: Letter, body: bytes) -> None:
        if self._closed:
            return
        peer = self._by_number.get(letter.peer)
        now = self._loop.time()
        if letter.kind == "hello":
            if peer is None:
                peer = await self._came(letter, now)
            if not peer.gone:
                welcome = Letter(kind="welcome", peer=letter.peer, host=self.host)
                self._broker.post(peer.half.queue, welcome)
            return
        if peer is None or peer.gone:
            return
        silent_s = now - peer.half.heard_at
        peer.half.heard_at = now
        if not letter.lasting:
            return
        try:
            if not peer.half.heard.new(letter, peer.id):
                return
            if letter.kind == "bye":
                await self._lose(peer, PeerLostError("The peer went away", where=peer.name), silent_s)
            else:
                await self._events.put((peer.id, messages.decode(body, peer.id)))
        except ProtocolError as error:
            await self._lose(peer, error, silent_s, tell=True)

    async def _came(self, letter: Letter, now: float) -> _Peer:
        queue = spoke_queue(self._run, letter.name or "?", letter.peer)
        peer = _Peer(f"{letter.name}#{next(self._numbers)}", letter.name, Half(letter.peer, queue, now, now))
        self._peers[peer.id] = self._by_number[letter.peer] = peer
        self._hosts[peer.id] = letter.host
        await self._events.put((peer.id, PeerCame(letter.name, letter.host)))
        return peer

    async def _lose(self, peer: _Peer, error: NetworkError, silent_s: float, *, tell: bool = False) -> None:
        if not peer.gone:
            if tell:
                self._broker.post(peer.half.queue, peer.half.next("bye", self._loop.time()))
            peer.gone = True
            await self._events.put((peer.id, PeerGone(peer.name, str(error), silent_s)))

    async def _failed(self, error: NetworkError) -> None:
        now = self._loop.time()
        for peer in list(self._peers.values()):
            await self._lose(peer, error, now - peer.half.heard_at)
        self._error = error
        await self._events.put(None)

    async def _tend(self) -> None:
        """Tell peers that we live, and find those that do not."""
        while True:
            await asyncio.sleep(min(self._heartbeat_s / 2, self._timeout_s / 4))
            if not self._broker.up:
                continue
            now = self._loop.time()
            for peer in [peer for peer in self._peers.values() if not peer.gone]:
                silent_s = peer.half.silent_s(now, self._broker.up_since)
                if self._broker.listening and silent_s > self._timeout_s:
                    error = silence(peer.name, self._timeout_s, self._heartbeat_s)
                    await self._lose(peer, error, silent_s, tell=True)
                elif now - peer.half.said_at >= self._heartbeat_s:
                    peer.half.said_at = now
                    self._broker.post(peer.half.queue, Letter(kind="beat", peer=peer.half.peer))
