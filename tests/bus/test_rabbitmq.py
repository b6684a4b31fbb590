"""What a broker adds to the contract: it can be absent, refuse, go away and come back; and it has other users."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import Awaitable, Callable

import aio_pika
import pytest

from splitlm.bus.address import Address
from splitlm.bus.base import PeerCame, PeerGone
from splitlm.bus.letter import Count, Letter, hub_queue, read, spoke_queue
from splitlm.bus.rabbitmq import RabbitHub, RabbitSpoke
from splitlm.core.errors import (
    AddressBusyError,
    NetworkError,
    PeerLostError,
    PeerMissingError,
    PeerRefusedError,
    ProtocolError,
    UsageError,
)
from splitlm.core.messages import Stop, Trouble
from tests.bus.server import HERE, Broker, access
from tests.cancelled import leaves_nothing, pauses
from tests.link.certificates import folders, good, unchecked

BEAT, SILENCE = 0.1, 1.5


def note(number: int) -> Trouble:
    return Trouble(number, "note")


def fails(
    place: Address,
    caplog: pytest.LogCaptureFixture,
    alike: type[NetworkError] | None = None,
) -> NetworkError:
    """The error of a hub that cannot open; the same ends a spoke, soon, in one paragraph, and nothing stays behind."""

    async def main() -> NetworkError:
        before = asyncio.all_tasks()
        began = time.monotonic()
        with pytest.raises(NetworkError) as caught:
            await RabbitHub.open(place, "run", HERE)
        with pytest.raises(alike or type(caught.value)):
            await RabbitSpoke.open(place, "run", "node", HERE, deadline_s=30)
        assert time.monotonic() - began < 20
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before
        return caught.value

    error = asyncio.run(main())
    text = str(error)
    assert str(place) in text and "\n" not in text and error.exit_code == 3
    assert "hunter2" not in text + repr(error) + caplog.text
    return error


def test_an_absent_broker_is_named_with_what_to_check(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        error = fails(Address(HERE, port, password="hunter2"), caplog)
    assert isinstance(error, PeerMissingError)
    assert "cannot be reached" in str(error) and "rabbit.port" in str(error)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "no..host", "h" * 70])
def test_a_host_that_is_not_found(host: str, caplog: pytest.LogCaptureFixture) -> None:
    error = fails(Address(host, 5672, password="hunter2"), caplog)
    assert "rabbit.address" in str(error)


def test_a_wrong_password_is_refused_and_not_shown(rabbit: Broker, caplog: pytest.LogCaptureFixture) -> None:
    error = fails(access(rabbit, password="hunter2"), caplog)
    assert isinstance(error, PeerRefusedError)
    assert "refused the user 'guest'" in str(error) and "rabbit.password" in str(error)


def test_an_unknown_virtual_host_is_named(rabbit: Broker, caplog: pytest.LogCaptureFixture) -> None:
    error = fails(access(rabbit, virtual_host="nowhere"), caplog)
    assert isinstance(error, PeerRefusedError)
    assert "'nowhere'" in str(error) and "rabbit.virtual-host" in str(error)


def test_a_plain_client_at_the_tls_port(rabbit: Broker, caplog: pytest.LogCaptureFixture) -> None:
    error = fails(Address(HERE, rabbit.tls_port), caplog)
    assert "rabbit.tls" in str(error)


def test_a_tls_client_at_the_plain_port(rabbit: Broker, caplog: pytest.LogCaptureFixture) -> None:
    error = fails(Address(HERE, rabbit.port, tls=good().dialling), caplog)
    assert "TLS" in str(error)


def test_a_broker_of_another_authority_is_refused(rabbit: Broker, caplog: pytest.LogCaptureFixture) -> None:
    wrong = unchecked("good/a", ssl.PROTOCOL_TLS_CLIENT, trust="other/a")
    error = fails(Address(HERE, rabbit.tls_port, tls=wrong), caplog)
    assert isinstance(error, PeerRefusedError)
    assert "is not signed by our CA" in str(error)


def test_a_broker_that_refuses_our_certificate(rabbit: Broker, caplog: pytest.LogCaptureFixture) -> None:
    wrong = unchecked("other/a", ssl.PROTOCOL_TLS_CLIENT)
    # TLS 1.3 refuses a client after its handshake: whether its reason or its end is read first is chance.
    error = fails(Address(HERE, rabbit.tls_port, tls=wrong), caplog, NetworkError)
    assert "certificate" in str(error)


def test_what_is_no_broker(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(NetworkError, match="no RabbitMQ broker"):
            await RabbitHub.open(Address(HERE, port, password="hunter2"), "run", HERE)
        server.close()

    asyncio.run(main())


def test_a_spoke_names_the_hub_that_never_came(rabbit: Broker) -> None:
    async def main() -> None:
        with pytest.raises(PeerMissingError, match=r"node 1 waited 0\.3 s for the hub of run lonely"):
            await RabbitSpoke.open(access(rabbit), "lonely", "node 1", HERE, deadline_s=0.3)

    asyncio.run(main())


def test_a_spoke_may_come_before_the_hub(rabbit: Broker) -> None:
    run = secrets.token_hex(4)

    async def main() -> None:
        joining = asyncio.create_task(RabbitSpoke.open(access(rabbit), run, "early", HERE, deadline_s=20))
        await asyncio.sleep(0.2)
        assert not joining.done()
        hub = await RabbitHub.open(access(rabbit), run, HERE)
        spoke = await joining
        assert isinstance((await hub.receive())[1], PeerCame)
        await asyncio.gather(hub.close(), spoke.close())

    asyncio.run(main())


def test_a_second_hub_of_one_run_is_refused(rabbit: Broker) -> None:
    run = secrets.token_hex(4)

    async def main() -> None:
        hub = await RabbitHub.open(access(rabbit), run, HERE)
        spoke = await RabbitSpoke.open(access(rabbit), run, "one", HERE)
        peer, _ = await hub.receive()
        with pytest.raises(AddressBusyError, match="Another process uses the queue of this run"):
            await RabbitHub.open(access(rabbit), run, HERE)
        await hub.send(peer, Stop("still here"))
        assert await spoke.receive() == Stop("still here")
        await asyncio.gather(hub.close(), spoke.close())

    asyncio.run(main())


def test_only_queues_of_the_run_are_emptied_and_none_is_left(rabbit: Broker) -> None:
    run = secrets.token_hex(4)
    foreign, sibling, stale = "somebody.else", hub_queue(f"{run}-2"), hub_queue(run)

    async def main() -> None:
        connection = await aio_pika.connect(host="127.0.0.1", port=rabbit.port)
        channel = await connection.channel()
        expires = {"x-expires": 600_000}
        for name, arguments in ((foreign, {}), (sibling, expires), (stale, expires)):
            await channel.declare_queue(name, durable=True, arguments=arguments)
            await channel.default_exchange.publish(aio_pika.Message(b"keep"), routing_key=name)
        hub = await RabbitHub.open(access(rabbit), run, HERE)
        spoke = await RabbitSpoke.open(access(rabbit), run, "one", HERE)
        peer, came = await hub.receive()
        assert isinstance(came, PeerCame)  # and nothing of what the old run had left
        await hub.send(peer, Stop())
        await asyncio.gather(hub.close(), spoke.close())
        for name in (foreign, sibling):
            queue = await channel.declare_queue(name, passive=True)
            assert queue.declaration_result.message_count == 1
        for name in (foreign, sibling):
            await channel.queue_delete(name)
        await connection.close()

    asyncio.run(main())
    assert rabbit.queues() == set()


def story(rabbit: Broker, told: Callable[[RabbitHub, RabbitSpoke, str], Awaitable[None]], beat: float = BEAT) -> None:
    """A hub and one spoke with quick heartbeats."""
    run = secrets.token_hex(4)

    async def main() -> None:
        before = asyncio.all_tasks()
        async with asyncio.timeout(150):
            times = {"heartbeat_s": BEAT, "timeout_s": SILENCE}
            hub = await RabbitHub.open(access(rabbit), run, HERE, **times)
            spoke = await RabbitSpoke.open(access(rabbit), run, "one", HERE, heartbeat_s=beat, timeout_s=SILENCE)
            peer, _ = await hub.receive()
            try:
                await told(hub, spoke, peer)
            finally:
                await asyncio.gather(hub.close(), spoke.close())
        await asyncio.sleep(0.05)
        assert asyncio.all_tasks() == before

    asyncio.run(main())


def test_a_peer_that_is_silent_is_gone_and_a_quiet_one_is_not(rabbit: Broker) -> None:
    async def quiet(hub: RabbitHub, spoke: RabbitSpoke, peer: str) -> None:
        await asyncio.sleep(2 * SILENCE)
        await spoke.send(note(1))
        assert await hub.receive() == (peer, note(1))
        await hub.send(peer, note(2))
        assert await spoke.receive() == note(2)

    async def silent(hub: RabbitHub, spoke: RabbitSpoke, peer: str) -> None:
        who, gone = await hub.receive()
        assert who == peer and isinstance(gone, PeerGone)
        assert gone.name == "one" and gone.silent_s >= SILENCE and "silent for 1.5 s" in gone.reason
        with pytest.raises(PeerLostError, match="gone"):
            await hub.send(peer, Stop())
        with pytest.raises(PeerLostError, match="The hub went away"):  # who was only slow hears that it is out
            await spoke.receive()

    story(rabbit, quiet)
    story(rabbit, silent, beat=1000)


def test_who_does_not_take_what_came_takes_nobody_for_silent(rabbit: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As while it computes for long: the hub's queue of events is full, and what peers say waits behind it."""
    monkeypatch.setattr("splitlm.bus.rabbitmq.MAX_WAITING", 1)

    async def busy(hub: RabbitHub, spoke: RabbitSpoke, peer: str) -> None:
        for number in (1, 2, 3):
            await spoke.send(note(number))
        await asyncio.sleep(3 * SILENCE)
        assert [(await hub.receive())[1] for _ in range(3)] == [note(1), note(2), note(3)]
        await asyncio.sleep(SILENCE / 2)
        await spoke.send(note(4))
        assert await hub.receive() == (peer, note(4))

    story(rabbit, busy)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_a_broker_that_restarts_loses_and_doubles_nothing(
    kill: bool, rabbit: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages go both ways, one after the other, while the broker goes down and comes up again."""

    async def through(hub: RabbitHub, spoke: RabbitSpoke, peer: str) -> None:
        over = asyncio.Event()
        heard: dict[str, list[int]] = {"hub": [], "spoke": []}
        sent = {"hub": 0, "spoke": 0}

        async def say(name: str, send: Callable[[Trouble], Awaitable[None]]) -> None:
            while not over.is_set() or not sent[name]:
                sent[name] += 1
                await send(note(sent[name]))
            sent[name] += 1
            await send(note(-1))

        async def hear(name: str, receive: Callable[[], Awaitable[object]]) -> None:
            while isinstance(message := await receive(), Trouble) and message.code >= 0:
                heard[name].append(message.code)

        async def of_hub() -> object:
            who, event = await hub.receive()
            assert who == peer, event
            assert not isinstance(event, PeerGone), event
            return event

        async def restart() -> None:
            await asyncio.sleep(0.3)
            await asyncio.to_thread(rabbit.stop, kill=kill)
            await asyncio.sleep(0.5)  # what it confirmed last is read
            before = dict(sent)
            await asyncio.sleep(2 * SILENCE)  # longer than a peer may be silent
            assert sent == before, "a message was taken for sent while there was no broker"
            await asyncio.to_thread(rabbit.start)
            while any(sent[name] < before[name] + 5 for name in sent):
                await asyncio.sleep(0.05)
            over.set()

        async with asyncio.TaskGroup() as group:
            group.create_task(say("hub", lambda message: hub.send(peer, message)))
            group.create_task(say("spoke", spoke.send))
            group.create_task(hear("hub", of_hub))
            group.create_task(hear("spoke", spoke.receive))
            group.create_task(restart())
        assert heard["hub"] == list(range(1, sent["spoke"]))
        assert heard["spoke"] == list(range(1, sent["hub"]))

    try:
        with caplog.at_level(logging.WARNING, "splitlm.bus"):
            story(rabbit, through)
    finally:
        rabbit.start()
    assert any("was lost; trying again" in r.getMessage() for r in caplog.records)
    assert any("is back" in r.getMessage() for r in caplog.records)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_broker_that_does_not_come_back_ends_both_sides(rabbit: Broker) -> None:
    run = secrets.token_hex(4)

    async def main() -> None:
        hub = await RabbitHub.open(access(rabbit), run, HERE, outage_s=1)
        spoke = await RabbitSpoke.open(access(rabbit), run, "one", HERE, outage_s=1)
        await hub.receive()
        await asyncio.to_thread(rabbit.stop)
        _, gone = await hub.receive()
        assert isinstance(gone, PeerGone) and "did not come back within 1 s" in gone.reason
        for call in (hub.receive(), hub.receive(), spoke.receive(), spoke.send(note(1))):
            with pytest.raises(PeerLostError, match=rf"127\.0\.0\.1:{rabbit.port}.*did not come back within 1 s"):
                await call
        await asyncio.gather(hub.close(), spoke.close())

    try:
        asyncio.run(main())
    finally:
        rabbit.start()


def test_a_letter_that_comes_twice_counts_once_and_a_hole_is_an_error() -> None:
    count = Count()

    def say(number: int) -> Letter:
        return read(Letter(kind="say", peer="p", number=number).headers())

    assert [count.new(say(n), "x") for n in (1, 2, 1, 2, 3)] == [True, True, False, False, True]
    with pytest.raises(ProtocolError, match="Message 4 was lost"):
        count.new(say(5), "x")


@pytest.mark.parametrize(
    "headers",
    [{}, {"kind": "say"}, {"kind": "shout", "peer": "p"}, {"kind": "say", "peer": 1}]
    + [{"kind": "say", "peer": "p", "number": n} for n in (-1, "1", 1.5)]
    + [{"kind": "say", "peer": "p", "name": "x" * 81}, {"kind": "say", "peer": "p", "more": 1}],
)
def test_headers_that_are_not_ours_are_refused(headers: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        read(headers)


def test_names_that_no_queue_can_have() -> None:
    assert hub_queue("a") != hub_queue("b")
    assert spoke_queue("a", "n", "1") != spoke_queue("a", "n", "2")
    for bad in ("", "ä" * 41):
        with pytest.raises(UsageError):
            hub_queue(bad)
        with pytest.raises(UsageError):
            spoke_queue("run", bad, "1")


def test_the_certificates_of_the_tests_are_of_two_authorities() -> None:
    """Else the refusals above would show nothing."""
    own, other = (folders() / name / "ca.pem" for name in ("good/a", "other/a"))
    assert own.read_bytes() != other.read_bytes()


def test_whoever_gives_up_while_it_connects_leaves_nothing(rabbit: Broker) -> None:
    async def main() -> None:
        moments = pauses(80, 0.0001)
        assert await leaves_nothing(lambda: RabbitHub.open(access(rabbit), secrets.token_hex(4), HERE), moments) < 80

    asyncio.run(main())
