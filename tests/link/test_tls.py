"""Meeting over TLS: whose certificate is not taken hears why, in one paragraph and at once; so does who speaks none."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time

import pytest

from splitlm.core.errors import NetworkError, PeerRefusedError, ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.link import tcp
from splitlm.wire.frame import PROTOCOL, Open, Said
from splitlm.wire.handshake import Claims, Identity
from tests.link.certificates import good, unchecked
from tests.link.test_channel import pair

CLIENT, SERVER = ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER
DEADLINE_S = 20.0


def identity(name: str) -> Identity:
    return Identity(Claims(node=name, version="1", protocol=PROTOCOL))


def meet(
    mine: ssl.SSLContext | None, theirs: ssl.SSLContext | None, honest: ssl.SSLContext | None = None
) -> NetworkError:
    """The dialler's error: it comes long before the deadline and leaves no task. Then an honest one is let in."""

    async def main() -> NetworkError:
        before = asyncio.all_tasks()
        listener = await tcp.listen("127.0.0.1", 0, identity("hub"), "data", tls=theirs)
        began = time.monotonic()
        with pytest.raises(NetworkError) as caught:
            await tcp.connect(
                "127.0.0.1", listener.port, identity("a"), "data", deadline_s=DEADLINE_S, who="the hub", tls=mine
            )
        assert time.monotonic() - began < DEADLINE_S / 2
        if honest is not None:
            channel = await tcp.connect(
                "127.0.0.1", listener.port, identity("b"), "data", deadline_s=DEADLINE_S, who="the hub", tls=honest
            )
            other = await listener.accept()
            assert other.claims.node == "b"
            await asyncio.gather(channel.close(), other.close())
        await listener.close()
        for _ in range(200):
            if asyncio.all_tasks() == before:
                break
            await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == before
        return caught.value

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "words", "heard"),
    [
        ("other/a", "refused our certificate: it is not signed by the CA", "is not signed by our CA"),
        ("expired/a", "refused our certificate: it has expired", "The peer's certificate has expired"),
    ],
)
def test_a_dialler_whose_certificate_is_not_taken_hears_why(
    name: str, words: str, heard: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        error = meet(unchecked(name, CLIENT), good("b").listening, good().dialling)
    assert isinstance(error, PeerRefusedError)
    assert words in str(error) and "the hub at 127.0.0.1:" in str(error)
    assert "\n" not in str(error)
    told = [r for r in caplog.records if r.name == "splitlm.link"]
    assert len(told) == 1 and heard in told[0].getMessage()
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("name", "words"), [("other/a", "is not signed by our CA"), ("expired/a", "The peer's certificate has expired")]
)
def test_a_listener_whose_certificate_is_not_taken_is_named(name: str, words: str) -> None:
    error = meet(good().dialling, unchecked(name, SERVER))
    assert isinstance(error, PeerRefusedError)
    assert words in str(error) and "the hub at 127.0.0.1:" in str(error)


def test_a_dialler_without_a_certificate_hears_that_it_needs_one() -> None:
    bare = ssl.SSLContext(CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    error = meet(bare, good("b").listening, good().dialling)
    assert isinstance(error, PeerRefusedError)
    assert "refused our certificate: there is none" in str(error)


def test_older_tls_is_not_spoken() -> None:
    old = unchecked("good/a", CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    error = meet(old, good("b").listening, good().dialling)
    assert isinstance(error, ProtocolError)
    assert "protocol version" in str(error) and "TLS 1.3" in str(error)


def test_a_plain_dialler_at_a_tls_port_hears_that_it_needs_tls(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "splitlm.link"):
        error = meet(None, good("b").listening, good().dialling)
    assert isinstance(error, PeerRefusedError)
    assert "does not speak TLS, and this side does" in str(error)
    assert len([r for r in caplog.records if "does not speak TLS" in r.getMessage()]) == 1


def test_a_tls_dialler_at_a_plain_port_hears_that_there_is_none() -> None:
    error = meet(good().dialling, None)
    assert isinstance(error, ProtocolError)
    assert "does not speak TLS, and this side does" in str(error) and "--tls" in str(error)


def test_a_thread_neither_reads_nor_writes_a_tls_socket_itself() -> None:
    """What it would read is encrypted, and what it would write is not."""

    async def main() -> None:
        async with asyncio.timeout(30), pair("tls") as (a, b):
            assert b.take_over() is None
            opened = Open(1, 100, Sampling())
            assert not a.send_now(opened)
            await a.send(opened)
            assert (await b.receive()).header == opened
        async with asyncio.timeout(30), pair("tcp") as (a, b):  # while of plain ones it does
            assert a.send_now(opened)
            assert b.take_over() is not None

    asyncio.run(main())


def test_nothing_that_is_sent_can_be_read_on_the_way() -> None:
    async def main() -> None:
        seen = bytearray()
        listener = await tcp.listen("127.0.0.1", 0, identity("hub"), "control", tls=good("b").listening)

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", listener.port)

            async def one(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                while data := await source.read(65536):
                    seen.extend(data)
                    sink.write(data)
                sink.write_eof()

            await asyncio.gather(one(reader, back), one(there, writer))
            back.close()
            writer.close()

        proxy = await asyncio.start_server(carry, "127.0.0.1", 0)
        port = proxy.sockets[0].getsockname()[1]
        a = await tcp.connect(
            "127.0.0.1", port, identity("marked-name"), "control", deadline_s=10, who="b", tls=good().dialling
        )
        b = await listener.accept()
        await a.send(Said(b"marked-words"))
        assert (await b.receive()).header == Said(b"marked-words")
        await asyncio.gather(a.close(), b.close(), listener.close())
        proxy.close()
        assert len(seen) > 500
        for mark in (b"marked", b"SPLM", b"hub"):
            assert mark not in seen

    asyncio.run(main())
