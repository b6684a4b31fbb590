"""Meeting over TCP: order, refusals, strangers, deadlines, addresses, and peers that die."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from splitlm.core.errors import (
    AddressBusyError,
    NetworkError,
    PeerLostError,
    PeerMissingError,
    PeerRefusedError,
    ProtocolError,
    UsageError,
)
from splitlm.core.sampling import Sampling
from splitlm.link import lobby, tcp
from splitlm.link.base import StreamChannel
from splitlm.wire.frame import PROTOCOL, Hello, Open, Said, encode
from splitlm.wire.handshake import Claims, Identity
from splitlm.wire.states import Purpose
from tests.cancelled import leaves_nothing, turns

HOST = "127.0.0.1"


def identity(name: str, token: str = "secret", **changes: object) -> Identity:
    claims = Claims(node=name, version="1", protocol=PROTOCOL, model="m")
    return Identity(msgspec.structs.replace(claims, **changes), token)


async def dial(port: int, who: Identity, purpose: Purpose = "control", deadline_s: float = 10) -> StreamChannel:
    return await tcp.connect(HOST, port, who, purpose, deadline_s=deadline_s, who="stage 1")


def run(story: Callable[[tcp.TcpListener], Awaitable[None]], **options: float) -> None:
    """A control listener; it is closed at the end, and no task may be left."""

    async def main() -> None:
        before = asyncio.all_tasks()
        async with asyncio.timeout(30):
            listener = await tcp.listen(HOST, 0, identity("hub"), "control", expect_peer="stage 2", **options)
            try:
                await story(listener)
            finally:
                await listener.close()
                await listener.close()
        assert asyncio.all_tasks() == before

    asyncio.run(main())


async def works(listener: tcp.TcpListener) -> None:
    """An honest peer is admitted and heard."""
    channel = await dial(listener.port, identity("honest"))
    other = await listener.accept()
    assert other.claims.node == "honest"
    await channel.send(Said(b"hi"))
    assert (await other.receive()).header == Said(b"hi")
    await asyncio.gather(channel.close(), other.close())


def test_the_dialler_may_come_first() -> None:
    async def main() -> None:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port = probe.getsockname()[1]
        dialling = asyncio.ensure_future(dial(port, identity("head")))
        await asyncio.sleep(0.05)
        assert not dialling.done()
        listener = await tcp.listen(HOST, port, identity("stage 1"), "control")
        channel, other = await asyncio.gather(dialling, listener.accept())
        await asyncio.gather(channel.close(), other.close(), listener.close())

    asyncio.run(main())


def test_who_waited_for_whom_where_and_how_long() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        with socket.socket() as silent:  # bound, never listening
            silent.bind((HOST, 0))
            port = silent.getsockname()[1]
            with pytest.raises(PeerMissingError, match=rf"head waited 0\.2 s for stage 1 at {HOST}:{port}.*refused"):
                await dial(port, identity("head"), deadline_s=0.2)
        where = f"{HOST}:{listener.port}"
        with pytest.raises(PeerMissingError, match=rf"^{where}: hub waited 0\.05 s for stage 2\."):
            await listener.accept(deadline_s=0.05)
        await works(listener)

    run(story)


def test_a_listener_that_never_answers_is_missing_at_the_deadline() -> None:
    async def main() -> None:
        with socket.socket() as mute:
            mute.bind((HOST, 0))
            mute.listen()
            with pytest.raises(PeerMissingError, match=r"waited 0\.2 s for stage 1"):
                await dial(mute.getsockname()[1], identity("head"), deadline_s=0.2)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("who", "purpose", "words"),
    [
        (identity("thief", "guess"), "control", "tokens differ"),
        (
            identity("stage 1", model="other"),
            "control",
            "config hash differs: hub has 'm', stage 1 has 'other'",
        ),
        (identity("stage 1"), "data", "wants a data link, but this port is for control links"),
    ],
)
def test_a_refused_peer_learns_why_and_the_listener_goes_on(
    who: Identity, purpose: Purpose, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(listener: tcp.TcpListener) -> None:
        with pytest.raises(PeerRefusedError, match=words):
            await dial(listener.port, who, purpose)
        await works(listener)

    with caplog.at_level(logging.WARNING, "splitlm.link"):
        run(story)
    assert len([r for r in caplog.records if words in r.getMessage()]) == 1
    assert "secret" not in caplog.text
    assert "guess" not in caplog.text


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02\x00" + bytes(99), b"SPLM\x07"]
)
def test_a_stranger_is_logged_once_and_forgotten(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def story(listener: tcp.TcpListener) -> None:
        reader, writer = await asyncio.open_connection(HOST, listener.port)
        writer.write(data)
        assert b"expected" in (await reader.read()).lower()  # a Refused frame, then the end
        writer.close()
        await writer.wait_closed()
        await works(listener)
        assert not listener._lobby.unfinished

    with caplog.at_level(logging.WARNING, "splitlm.link"):
        run(story)
    assert len(caplog.records) == 1
    assert f"{HOST}:" in caplog.text


def test_a_slow_handshake_blocks_nobody_and_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def story(listener: tcp.TcpListener) -> None:
        slow = [await asyncio.open_connection(HOST, listener.port) for _ in range(3)]
        slow[1][1].write(b"SPLM" + bytes([PROTOCOL]))
        slow[2][1].write(b"".join(encode(Hello("control", bytes(32)))))
        await works(listener)
        for reader, writer in slow:
            assert b"not finished in time" in await reader.read()
            writer.close()
            await writer.wait_closed()
        await works(listener)

    with caplog.at_level(logging.WARNING, "splitlm.link"):
        run(story, handshake_s=0.3)
    assert caplog.text.count("not finished in time") == 3


def test_the_deadline_of_a_handshake_ends_with_it() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        channel = await dial(listener.port, identity("a"))
        other = await listener.accept()
        await asyncio.sleep(0.6)
        await channel.send(Said(b"still here"))
        assert (await other.receive()).header == Said(b"still here")
        await asyncio.gather(channel.close(), other.close())

    run(story, handshake_s=0.3)


def test_handshakes_under_way_are_capped_and_room_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "MAX_UNFINISHED", 2)

    async def story(listener: tcp.TcpListener) -> None:
        slow = [await asyncio.open_connection(HOST, listener.port) for _ in range(2)]
        while len(listener._lobby.unfinished) < 2:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection(HOST, listener.port)
        with contextlib.suppress(ConnectionResetError):  # dropped, by either FIN or RST
            assert await reader.read() == b""
        writer.close()
        waiting = asyncio.ensure_future(works(listener))  # retries until there is room
        await asyncio.sleep(0.05)
        assert not waiting.done()
        for _, writer in slow:
            writer.close()
        await waiting

    run(story)


def test_a_port_in_use_is_named_with_a_remedy() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        port = listener.port
        with pytest.raises(AddressBusyError, match=rf"{HOST}:{port}: Port {port} is in use.*another port"):
            await tcp.listen(HOST, listener.port, identity("x"), "data")

    run(story)


def test_a_port_just_closed_can_be_taken_again() -> None:
    async def main() -> None:
        listener = await tcp.listen(HOST, 0, identity("hub"), "control")
        port = listener.port
        channel = await dial(port, identity("a"))
        other = await listener.accept()
        await other.close()  # this side closes first and leaves the port in TIME_WAIT
        await asyncio.gather(channel.close(), listener.close())
        again = await tcp.listen(HOST, port, identity("hub"), "control")
        await works(again)
        await again.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "port", "kind", "words"),
    [
        ("192.0.2.1", 0, NetworkError, "not an address of this machine.*0.0.0.0"),
        ("no-such-host.invalid", 0, NetworkError, "'no-such-host.invalid' cannot be resolved"),
        ("x" * 80 + ".example", 0, NetworkError, "cannot be resolved"),
        (HOST, 65536, UsageError, "65536 is not a port.*0 to 65535"),
        (HOST, -1, UsageError, "-1 is not a port"),
    ],
)
def test_addresses_that_cannot_be(host: str, port: int, kind: type[NetworkError], words: str) -> None:
    async def main() -> None:
        with pytest.raises(kind, match=words):
            await tcp.listen(host, port, identity("x"), "data")
        if host != "192.0.2.1":
            with pytest.raises(kind, match=words):
                await tcp.connect(host, port, identity("x"), "data", deadline_s=5, who="y")

    asyncio.run(main())


def test_localhost_means_the_same_on_both_sides() -> None:
    async def main() -> None:
        listener = await tcp.listen("localhost", 0, identity("hub"), "control")
        assert listener.host == HOST
        channel = await tcp.connect("localhost", listener.port, identity("a"), "control", deadline_s=5, who="hub")
        other = await listener.accept()
        assert channel.host == other.host == HOST
        await asyncio.gather(channel.close(), other.close(), listener.close())

    asyncio.run(main())


def test_dialling_something_else_is_a_protocol_error_at_once() -> None:
    async def main() -> None:
        async def http(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(http, HOST, 0) as server:
            with pytest.raises(ProtocolError, match=r"stage 1 at 127\.0\.0\.1:.*not a splitlm frame.*b'HTTP'"):
                await dial(server.sockets[0].getsockname()[1], identity("head"))

    asyncio.run(main())


def test_small_frames_are_not_delayed_and_a_vanished_machine_is_probed_for() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        channel = await dial(listener.port, identity("a"))
        other = await listener.accept()
        for each in (channel, other):
            assert each._transport is not None
            assert each._transport.get_write_buffer_limits() == (0, 0)
            sock = each._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        await asyncio.gather(channel.close(), other.close())

    run(story)


def test_claims_may_come_after_the_listener() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        listener._identity.claims = msgspec.structs.replace(listener._identity.claims, model="late")
        channel = await dial(listener.port, identity("a", model="late"))
        assert channel.claims.model == "late"
        other = await listener.accept()
        await asyncio.gather(channel.close(), other.close())

    run(story)


def test_closing_the_listener_drops_who_was_not_accepted_and_keeps_who_was() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        kept = await dial(listener.port, identity("kept"))
        other = await listener.accept()
        dropped = await dial(listener.port, identity("dropped"))
        _, half = await asyncio.open_connection(HOST, listener.port)
        waiting = asyncio.ensure_future(dropped.receive())
        await asyncio.sleep(0.01)
        await listener.close()
        with pytest.raises(PeerLostError):
            await waiting
        for _ in range(2):
            with pytest.raises(NetworkError, match="listener was closed"):
                await listener.accept()
        await kept.send(Said(b"still here"))
        assert (await other.receive()).header == Said(b"still here")
        half.close()
        await asyncio.gather(kept.close(), other.close(), dropped.close())

    run(story)


def test_a_waiting_accept_ends_when_the_listener_closes() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        waiting = asyncio.ensure_future(listener.accept())
        await asyncio.sleep(0)
        await listener.close()
        with pytest.raises(NetworkError, match="listener was closed"):
            await waiting

    run(story)


def test_a_peer_that_came_and_went_before_it_was_accepted_is_skipped() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        gone = await dial(listener.port, identity("gone"))
        await gone.close()
        await works(listener)

    run(story)


def test_a_cancelled_connect_leaves_nothing() -> None:
    async def main() -> None:
        with socket.socket() as mute:
            mute.bind((HOST, 0))
            mute.listen()
            dialling = asyncio.ensure_future(dial(mute.getsockname()[1], identity("head")))
            await asyncio.sleep(0.05)
            dialling.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dialling
            conn, _ = mute.accept()
            with conn:
                conn.settimeout(5)
                hello = conn.recv(4096)
                assert hello.startswith(b"SPLM")
                assert conn.recv(4096) == b""
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())


CHILD = """
import asyncio, sys
from splitlm.core.sampling import Sampling
from splitlm.link import tcp
from splitlm.wire.frame import PROTOCOL, Hidden, Open, Spec, encode
from splitlm.wire.handshake import Claims, Identity

async def main():
    me = Identity(Claims(node="stage 2", version="1", protocol=PROTOCOL))
    channel = await tcp.connect("127.0.0.1", int(sys.argv[1]), me, "data", deadline_s=10, who="head")
    await channel.send(Open(1, 9, Sampling()))
    whole = b"".join(encode(Hidden(1, 0, 0, True, tensors=(Spec("uint8", (9000,)),)), [bytes(9000)]))
    channel._transport.write(whole[:4000])
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_process_killed_in_the_middle_of_a_frame_is_named() -> None:
    async def main() -> None:
        me = Identity(Claims(node="head", version="1", protocol=PROTOCOL))
        listener = await tcp.listen(HOST, 0, me, "data")
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", CHILD, str(listener.port))
        channel = await listener.accept(deadline_s=30)
        assert (await channel.receive()).header == Open(1, 9, Sampling())
        while not channel._inbox.decoder.partial_bytes:
            await asyncio.sleep(0.005)
        child.send_signal(signal.SIGKILL)
        words = r"^stage 2 at 127\.0\.0\.1:\d+: .*in the middle of a frame, after 4000 bytes"
        with pytest.raises(PeerLostError, match=words):
            await asyncio.wait_for(channel.receive(), 10)
        await asyncio.gather(channel.close(), listener.close(), child.wait())

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_listener_that_is_cancelled_at_any_turn_leaves_no_socket() -> None:
    async def make() -> tcp.TcpListener:
        return await tcp.listen(HOST, 0, identity("hub"), "control")

    async def main() -> None:
        assert 0 < await leaves_nothing(make, turns(20)) < 20

    asyncio.run(main())


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_dialler_that_is_cancelled_at_any_turn_leaves_no_socket() -> None:
    async def story(listener: tcp.TcpListener) -> None:
        async def take() -> None:
            while True:
                await (await listener.accept()).close()

        taking = asyncio.create_task(take())
        assert await leaves_nothing(lambda: dial(listener.port, identity("node")), turns(60)) < 60
        taking.cancel()
        await asyncio.wait({taking})

    run(story)


def test_a_link_that_the_peer_reset_is_closed_like_any_other() -> None:
    """The reset is with the kernel, and the loop has not heard of it yet: it must not come out of ``close``."""

    async def story(listener: tcp.TcpListener) -> None:
        channel, other = await dial(listener.port, identity("node")), await listener.accept()
        sock = other._transport.get_extra_info("socket")  # type: ignore[union-attr]
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.cut()
        await asyncio.sleep(0)  # the socket of the one is closed; the other's has it next
        time.sleep(0.05)  # noqa: ASYNC251 - the loop is not to hear of it
        await channel.close()
        await other.close()

    run(story)
