"""What every channel does, over memory, over TCP and over TLS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from splitlm.core.errors import NetworkError, PeerLostError, PeerRefusedError, ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.link import base, memory, tcp
from splitlm.link.base import StreamChannel
from splitlm.link.inbox import MAX_QUEUED
from splitlm.wire.frame import PROTOCOL, Close, Hidden, Open, Said, Spec, Token, encode
from splitlm.wire.handshake import Claims, Identity
from splitlm.wire.pool import SMALLEST, BufferPool
from splitlm.wire.states import Purpose
from tests.link.certificates import good

KINDS = ("memory", "tcp", "tls")
OPENED = Open(1, 100, Sampling())
Story = Callable[[StreamChannel, StreamChannel], Awaitable[None]]


def claims(name: str) -> Claims:
    return Claims(node=name, version="1", protocol=PROTOCOL)


def hidden(n: int, position: int = 0) -> Hidden:
    return Hidden(1, 0, position, True, tensors=(Spec("uint8", (n,)),))


@asynccontextmanager
async def pair(
    kind: str, purpose: Purpose = "data", pool: BufferPool | None = None
) -> AsyncIterator[tuple[StreamChannel, StreamChannel]]:
    """Dialler and listener; ``pool`` is the listener's. Both are closed, and no task may be left."""
    before = asyncio.all_tasks()
    if kind == "memory":
        a, b = memory.pair(claims("a"), claims("b"), purpose=purpose, pool_b=pool)
    else:
        mine, theirs = (good("a").dialling, good("b").listening) if kind == "tls" else (None, None)
        me, you = Identity(claims("a")), Identity(claims("b"))
        listener = await tcp.listen("127.0.0.1", 0, you, purpose, pool=pool, tls=theirs)
        a = await tcp.connect("127.0.0.1", listener.port, me, purpose, deadline_s=10, who="b", tls=mine)
        b = await listener.accept()
        await listener.close()
    try:
        yield a, b
    finally:
        await asyncio.gather(a.close(), b.close())
        for each in (a, b):
            assert each.lost.done()
            assert each._timer is None or each._timer.cancelled()
        assert asyncio.all_tasks() == before


def run(kind: str, story: Story, purpose: Purpose = "data", pool: BufferPool | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pair(kind, purpose, pool) as (a, b):
            await story(a, b)

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_frames_arrive_in_order_and_whole(kind: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        sent = [bytes([i]) * n for i, n in enumerate((1, 0, 2304, 70_000, 3))]
        await a.send(OPENED)
        for i, data in enumerate(sent):
            await a.send(hidden(len(data), i), [data])
        await a.send(Close(1))
        assert (await b.receive()).header == OPENED
        for i, data in enumerate(sent):
            frame = await b.receive()
            assert frame.header == hidden(len(data), i)
            assert bytes(frame.tensors[0]) == data
            assert frame.received_ns > 0
            frame.release()
        assert (await b.receive()).header == Close(1)
        assert a.claims == claims("b")
        assert b.claims == claims("a")
        assert a.peer.startswith("b at ")
        assert b.peer.startswith("a at ")
        assert a.bytes_out == b.bytes_in > sum(map(len, sent))
        assert b.bytes_out == a.bytes_in

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_may_be_overwritten_once_it_was_sent(kind: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        async def reader() -> list[bytes]:
            await b.receive()
            got = []
            for _ in range(8):
                frame = await b.receive()
                got.append(bytes(frame.tensors[0]))
                frame.release()
            return got

        reading = asyncio.ensure_future(reader())
        data = bytearray(1 << 20)
        await a.send(OPENED)
        for i in range(8):
            data[:] = bytes([i]) * len(data)
            await a.send(hidden(len(data), i), [data])
        assert await reading == [bytes([i]) * len(data) for i in range(8)]

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_large_tensors_both_ways_at_once_do_not_deadlock(kind: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pair(kind) as (a1, b1), pair(kind) as (b2, a2):

            async def node(out: StreamChannel, inbound: StreamChannel) -> int:
                await out.send(OPENED)
                for i in range(10):  # as a relay does: nothing is read while it sends
                    await out.send(hidden(1 << 20, i), [bytes(1 << 20)])
                return len([(await inbound.receive()).release() for _ in range(11)])

            assert await asyncio.gather(node(a1, a2), node(b2, b1)) == [11, 11]

    asyncio.run(main())


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_that_stops_holds_the_sender_back(kind: str) -> None:
    """By frames: no more than the bound waits at the receiver, and every frame arrives once it reads on."""

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        sent, size, total = 0, 60_000, 400

        async def sender() -> None:
            nonlocal sent
            await a.send(OPENED)
            for i in range(total):
                await a.send(hidden(size, i), [bytes(size)])
                sent += 1

        sending = asyncio.ensure_future(sender())
        last = -1
        while last < MAX_QUEUED or last != sent:  # until it moves no more
            last = sent
            await asyncio.sleep(0.2)
        assert sent < total
        assert len(b._inbox.queue) == MAX_QUEUED
        assert (await b.receive()).header == OPENED
        for i in range(total):
            frame = await b.receive()
            assert isinstance(frame.header, Hidden)
            assert frame.header.position == i
            frame.release()
        await sending

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_small_frames_beyond_the_bound_wait_in_the_decoder(kind: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        total = 5 * MAX_QUEUED
        for i in range(total):
            await a.send(Said(b"%d" % i))
        for i in range(total):
            assert (await b.receive()).header == Said(b"%d" % i)
            assert len(b._inbox.queue) <= MAX_QUEUED

    run(kind, story, "control")


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_pool_pauses_reading_until_another_thread_releases(kind: str) -> None:
    pool = BufferPool(4 * SMALLEST)

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        total = 40

        async def sender() -> None:
            await a.send(OPENED)
            for i in range(total):
                await a.send(hidden(SMALLEST, i), [bytes([i]) * SMALLEST])

        sending = asyncio.ensure_future(sender())
        await b.receive()
        held = [await b.receive() for _ in range(4)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await b.receive()
        for i in range(total):
            frame = held.pop(0)
            assert bytes(frame.tensors[0]) == bytes([i]) * SMALLEST
            if i + 4 < total:
                waiting = asyncio.ensure_future(b.receive())
                await asyncio.sleep(0.001)
                assert not waiting.done()
                await asyncio.to_thread(frame.release)  # this wakes who waits
                held.append(await waiting)
            else:
                frame.release()
        await sending
        assert pool.held_bytes <= 4 * SMALLEST

    run(kind, story, pool=pool)
    assert pool.lent_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_before_closing_arrives_then_the_loss_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "LINGER_S", 1000)  # a peer that reacts is not waited for longer than it takes

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        await a.send(hidden(30_000), [bytes(30_000)])
        closing = asyncio.ensure_future(a.close())
        assert (await b.receive()).header == OPENED
        assert (await b.receive()).header == hidden(30_000)
        for _ in range(2):
            with pytest.raises(PeerLostError, match=r"^a at .*went away\.$"):
                await b.receive()
        with pytest.raises(PeerLostError, match=r"^a at "):
            await b.send(Said(b""))
        await closing

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_channel_says_so_and_closing_again_is_nothing(kind: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        closing = asyncio.ensure_future(b.close())
        await a.close()
        assert a.lost.done()
        await asyncio.gather(a.close(), a.close(), closing)
        for call in (a.receive(), a.send(OPENED), b.receive()):
            with pytest.raises(PeerLostError, match="closed by this side"):
                await call

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_gives_unread_frames_back_and_wakes_the_reader(kind: str) -> None:
    pool = BufferPool()

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        await a.send(hidden(100), [bytes(100)])
        await b.receive()
        while not b.pending:
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(a.receive())
        await asyncio.sleep(0)
        await asyncio.gather(a.close(), b.close())
        with pytest.raises(PeerLostError, match="closed by this side"):
            await waiting

    run(kind, story, pool=pool)
    assert pool.lent_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_killed_in_the_middle_of_a_frame(kind: str) -> None:
    pool = BufferPool()

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        whole = b"".join(encode(hidden(5000), [bytes(5000)]))
        assert a._transport is not None
        a._transport.write(whole[:3000])
        while b.bytes_in < a.bytes_out + 3000:
            await asyncio.sleep(0)
        a._transport.abort()
        assert (await b.receive()).header == OPENED
        with pytest.raises(PeerLostError, match=r"^a at .*in the middle of a frame, after 3000 bytes of it"):
            await b.receive()
        await b.lost
        assert pool.lent_bytes == 0

    run(kind, story, pool=pool)
    assert pool.lent_bytes == 0


def test_a_reset_comes_after_the_frames_that_were_complete() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        total = MAX_QUEUED + 20  # some of them are still in the decoder
        for i in range(total):
            await a.send(Said(b"%d" % i))
        while len(b._inbox.queue) < MAX_QUEUED:
            await asyncio.sleep(0)
        assert isinstance(b._transport, memory.MemoryTransport)
        b._transport.reset()
        await b.lost
        for i in range(total):
            assert (await b.receive()).header == Said(b"%d" % i)
        with pytest.raises(PeerLostError, match="connection reset"):
            await b.receive()

    run("memory", story, "control")


@pytest.mark.parametrize("kind", KINDS)
def test_a_violation_is_told_to_both_sides_after_the_good_frames(kind: str) -> None:
    pool = BufferPool()
    wrong = Token(1, 0, 0, 5, tensors=(Spec("float32", (9,)),))

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        assert a._transport is not None
        a._transport.write(b"".join(encode(wrong, [bytes(36)])))
        assert (await b.receive()).header == OPENED
        with pytest.raises(ProtocolError, match=r"^a at .*A Token frame from the dialler in state 'sessions'"):
            await b.receive()
        with pytest.raises(PeerRefusedError, match=r"^b at .*The peer refused: A Token frame.*Expected Open or Hidden"):
            await a.receive()
        with pytest.raises(NetworkError):
            await a.send(OPENED)
        assert pool.lent_bytes == 0

    run(kind, story, pool=pool)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frame_out_of_turn_is_not_sent(kind: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        with pytest.raises(ProtocolError, match="A Token frame from the listener"):
            await b.send(Token(1, 0, 0, 5))
        await a.send(Token(1, 0, 0, 5))
        assert (await b.receive()).header == Token(1, 0, 0, 5)

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_receive_loses_nothing_and_two_readers_are_a_mistake(kind: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        waiting = asyncio.ensure_future(b.receive())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await b.receive()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await a.send(OPENED)
        assert (await b.receive()).header == OPENED

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sender_held_back_by_a_peer_that_leaves_is_let_go(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer said goodbye and reads no more, but its machine still holds the connection."""
    monkeypatch.setattr(base, "LINGER_S", 0.1)

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        await b.receive()
        assert b._transport is not None
        b._transport.pause_reading()
        sending = asyncio.ensure_future(a.send(hidden(32 << 20), [bytes(32 << 20)]))
        await asyncio.sleep(0.01)
        b._transport.write_eof()
        with pytest.raises(PeerLostError, match="went away"):
            await asyncio.wait_for(sending, 10)

    run(kind, story)


@pytest.mark.parametrize("kind", KINDS)
def test_closing_does_not_wait_long_for_a_peer_that_does_not_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FLUSH_S", 0.1)
    monkeypatch.setattr(base, "LINGER_S", 0.1)

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        assert b._transport is not None
        b._transport.pause_reading()
        await a.send(OPENED)
        big = asyncio.ensure_future(a.send(hidden(32 << 20), [bytes(32 << 20)]))
        await asyncio.sleep(0.01)
        assert not big.done()
        await a.close()
        assert isinstance((await asyncio.gather(big, return_exceptions=True))[0], PeerLostError)

    run(kind, story)
