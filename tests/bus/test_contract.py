"""One contract, five ways: the double, the star over memory and over TCP, and a broker, plainly and over TLS."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from splitlm.bus.base import Hub, PeerCame, PeerGone, Spoke
from splitlm.bus.memory import MemoryHub
from splitlm.bus.rabbitmq import RabbitHub, RabbitSpoke
from splitlm.bus.star import StarHub, StarSpoke
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError
from splitlm.core.messages import MAX_MESSAGE_BYTES, Stop, Trouble
from splitlm.link import memory, tcp
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims, Identity
from tests.bus.server import HERE, Broker, access

Join = Callable[[str], Awaitable[Spoke]]
KINDS = ("double", "memory", "tcp", "amqp", "amqps")


@dataclass(frozen=True)
class World:
    """Where a contract is tested; ``host`` is what each side sees of the other."""

    kind: str
    broker: Broker | None = None

    @property
    def host(self) -> str:
        return "memory" if self.kind in ("double", "memory") else "127.0.0.1"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> World:
    return World(request.param, request.getfixturevalue("rabbit") if "amqp" in request.param else None)


def note(number: int) -> Trouble:
    """Some message."""
    return Trouble(number, "note")


def identity(name: str) -> Identity:
    return Identity(Claims(node=name, version="1", protocol=PROTOCOL), "secret")


@asynccontextmanager
async def world(at: World) -> AsyncIterator[tuple[Hub, Join]]:
    """A hub and a way to join it; everything is closed, and no task may be left."""
    before = asyncio.all_tasks()
    spokes: list[Spoke] = []
    join: Join
    if at.kind == "double":
        double = MemoryHub()
        hub: Hub = double

        async def join(name: str) -> Spoke:
            spokes.append(double.join(name))
            return spokes[-1]

    elif at.kind == "memory":
        near = memory.MemoryListener(identity("hub"), "control")
        hub = StarHub(near)

        async def join(name: str) -> Spoke:
            spokes.append(StarSpoke(await memory.connect(near, identity(name), "control")))
            return spokes[-1]

    elif at.broker is not None:
        run_name = secrets.token_hex(4)
        hub = await RabbitHub.open(access(at.broker, tls=at.kind == "amqps"), run_name, HERE)
        broker = at.broker

        async def join(name: str) -> Spoke:
            spokes.append(await RabbitSpoke.open(access(broker, tls=at.kind == "amqps"), run_name, name, HERE))
            return spokes[-1]

    else:
        far = await tcp.listen("127.0.0.1", 0, identity("hub"), "control")
        hub = StarHub(far)

        async def join(name: str) -> Spoke:
            channel = await tcp.connect("127.0.0.1", far.port, identity(name), "control", deadline_s=10, who="the hub")
            spokes.append(StarSpoke(channel))
            return spokes[-1]

    try:
        yield hub, join
    finally:
        await asyncio.gather(hub.close(), *(spoke.close() for spoke in spokes))
        await hub.close()
        assert asyncio.all_tasks() == before


def run(kind: World, story: Callable[[Hub, Join], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), world(kind) as (hub, join):
            await story(hub, join)

    asyncio.run(main())


def test_arrival_messages_and_departure_come_in_order(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        spoke = await join("stage 1")
        sent = [note(1), note(2), Stop("enough")]
        for message in sent:
            await spoke.send(message)
        await spoke.close()
        events = [await hub.receive() for _ in range(5)]
        assert len({peer for peer, _ in events}) == 1
        came, *said, gone = (event for _, event in events)
        assert isinstance(came, PeerCame)
        assert came.name == "stage 1"
        assert said == sent
        assert isinstance(gone, PeerGone)
        assert gone.name == "stage 1"
        assert "went away" in gone.reason

    run(kind, story)


def test_the_hub_speaks_to_one_peer_and_knows_where_it_is(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        one, two = await join("one"), await join("two")
        ids = {}
        for _ in range(2):
            peer, event = await hub.receive()
            assert isinstance(event, PeerCame)
            assert hub.address(peer) == event.host == kind.host
            ids[event.name] = peer
        await hub.send(ids["two"], Stop("for two"))
        await hub.send(ids["one"], Stop("for one"))
        assert await one.receive() == Stop("for one")
        assert await two.receive() == Stop("for two")
        assert one.hub_host == kind.host

    run(kind, story)


def test_the_last_words_of_a_closing_hub_arrive(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        spoke = await join("one")
        peer, _ = await hub.receive()
        await hub.send(peer, Trouble(3, "the ring broke"))
        await hub.send(peer, Stop("bye"))
        await hub.close()
        assert await spoke.receive() == Trouble(3, "the ring broke")
        assert await spoke.receive() == Stop("bye")
        for _ in range(2):
            with pytest.raises(PeerLostError):
                await spoke.receive()
        with pytest.raises(PeerLostError):
            await spoke.send(note(0))
        with pytest.raises(NetworkError, match="closed"):
            await hub.receive()

    run(kind, story)


def test_nothing_more_is_heard_of_a_dropped_peer(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        bad, good = await join("bad"), await join("good")
        ids = {}
        for _ in range(2):
            peer, event = await hub.receive()
            assert isinstance(event, PeerCame)
            ids[event.name] = peer
        await bad.send(note(6))
        await asyncio.sleep(0.05)  # until it waits at the hub
        await hub.drop(ids["bad"])
        await hub.drop(ids["bad"])
        await good.send(note(1))
        assert await hub.receive() == (ids["good"], note(1))
        with pytest.raises(PeerLostError):
            await hub.send(ids["bad"], Stop())
        with pytest.raises(PeerLostError):
            await bad.receive()

    run(kind, story)


def test_sending_to_one_that_left_or_never_was_is_a_lost_peer(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        spoke = await join("one")
        peer, _ = await hub.receive()
        await spoke.close()
        assert isinstance((await hub.receive())[1], PeerGone)
        assert hub.address(peer)
        for name in (peer, "nobody"):
            with pytest.raises(PeerLostError, match="gone"):
                await hub.send(name, Stop())
        with pytest.raises(PeerLostError, match="nobody"):
            hub.address("nobody")

    run(kind, story)


def test_a_message_over_the_limit_is_refused_where_it_is_sent(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        spoke = await join("one")
        with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
            await spoke.send(Trouble(1, "x" * MAX_MESSAGE_BYTES))
        peer, _ = await hub.receive()
        with pytest.raises(ProtocolError, match=str(MAX_MESSAGE_BYTES)):
            await hub.send(peer, Trouble(1, "x" * MAX_MESSAGE_BYTES))
        await spoke.send(note(1))
        assert await hub.receive() == (peer, note(1))

    run(kind, story)


def test_a_receive_that_is_cancelled_loses_nothing(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        spoke = await join("one")
        await hub.receive()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await hub.receive()
        await spoke.send(note(3))
        assert (await hub.receive())[1] == note(3)

    run(kind, story)


def test_closing_wakes_whoever_waits(kind: World) -> None:
    async def story(hub: Hub, join: Join) -> None:
        spoke = await join("one")
        await hub.receive()
        waiting = [asyncio.ensure_future(hub.receive()), asyncio.ensure_future(spoke.receive())]
        await asyncio.sleep(0)
        await asyncio.gather(hub.close(), spoke.close())
        for error in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(error, NetworkError)

    run(kind, story)
