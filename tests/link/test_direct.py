"""A thread that reads a channel's socket itself gets what the loop would have given it."""

from __future__ import annotations

import asyncio
import select
import threading
from collections.abc import Awaitable, Callable

import pytest

from splitlm.core.errors import NetworkError, PeerLostError, PeerRefusedError, ProtocolError
from splitlm.link.base import StreamChannel
from splitlm.link.direct import DirectReader
from splitlm.wire.frame import Close, Frame, Refused, Token, encode
from splitlm.wire.pool import SMALLEST, BufferPool
from tests.link.test_channel import OPENED, hidden, pair

Story = Callable[[StreamChannel, StreamChannel], Awaitable[None]]


def run(story: Story, pool: BufferPool | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pair("tcp", "data", pool) as (a, b):
            await story(a, b)

    asyncio.run(main())


def taken(channel: StreamChannel) -> DirectReader:
    reader = channel.take_over()
    assert reader is not None
    return reader


async def following(reader: DirectReader) -> Frame:
    """The next frame, as a thread that polls gets it."""

    def wait() -> Frame:
        while (frame := reader.read()) is None:
            poll = select.poll()
            poll.register(reader.fileno(), select.POLLIN)
            assert poll.poll(10_000)
        return frame

    return await asyncio.to_thread(wait)


def test_frames_from_before_and_after_the_change_come_in_order_and_whole() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        sizes = (1, 0, 2304, 70_000, 1_000_000, 3)
        await a.send(OPENED)
        await a.send(hidden(1, 0), [b"0"])
        while not b.pending:
            await asyncio.sleep(0.001)
        reader = taken(b)
        frames = [await following(reader), await following(reader)]
        sending = asyncio.gather(*(a.send(hidden(n, i), [bytes([i]) * n]) for i, n in enumerate(sizes)))
        frames += [await following(reader) for _ in sizes]
        await sending
        assert frames[0].header == OPENED and bytes(frames[1].tensors[0]) == b"0"
        for i, (n, frame) in enumerate(zip(sizes, frames[2:], strict=True)):
            assert frame.header == hidden(n, i) and bytes(frame.tensors[0]) == bytes([i]) * n
            assert frame.received_ns > 0
            frame.release()
        assert reader.read() is None
        assert b.bytes_in == a.bytes_out
        with pytest.raises(RuntimeError, match="already waiting"):
            await b.receive()
        assert b.take_over() is None

    run(story)


def test_what_is_no_socket_is_left_to_the_loop() -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pair("memory") as (a, b):
            assert b.take_over() is None
            await a.send(OPENED)
            assert (await b.receive()).header == OPENED

    asyncio.run(main())


def test_a_peer_that_leaves_is_lost_after_its_last_frame() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        reader = taken(b)
        await a.send(OPENED)
        closing = asyncio.create_task(a.close())
        assert (await following(reader)).header == OPENED
        with pytest.raises(PeerLostError, match=r"a at .*: The peer went away"):
            await following(reader)
        await closing  # which waits for this side to end the connection too
        await b.lost
        with pytest.raises(PeerLostError, match="went away"):
            reader.read()

    run(story)


def test_a_peer_killed_in_the_middle_of_a_frame() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        reader = taken(b)
        await a.send(OPENED)
        assert a._transport is not None
        a._transport.write(b"".join(encode(hidden(5000), [bytes(5000)]))[:1000])
        assert (await following(reader)).header == OPENED
        a.cut()
        with pytest.raises(PeerLostError, match="in the middle of a frame, after 1000 bytes"):
            await following(reader)

    run(story)


@pytest.mark.parametrize(
    ("data", "words"), [(b"not a frame", "not a splitlm frame"), (b"".join(encode(Token(1, 0, 1, 1))), "Token frame")]
)
def test_a_violation_is_told_to_both_sides_after_the_good_frames(data: bytes, words: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        reader = taken(b)
        assert a._transport is not None
        a._transport.write(b"".join(encode(OPENED)) + data)
        assert (await following(reader)).header == OPENED
        with pytest.raises(ProtocolError, match=words):
            await following(reader)
        with pytest.raises(PeerRefusedError, match=words):
            await a.receive()
        assert isinstance(b.error, ProtocolError)

    run(story)


def test_a_refusal_is_passed_on_with_its_reason() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        reader = taken(b)
        await a.send(Refused("no more"))
        with pytest.raises(PeerRefusedError, match="no more"):
            await following(reader)
        await b.lost

    run(story)


def test_an_empty_pool_leaves_bytes_with_the_kernel_until_a_release() -> None:
    pool = BufferPool(SMALLEST)

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        reader = taken(b)
        woken = threading.Event()
        reader.attach(woken.set)
        await a.send(OPENED)
        for i in range(2):
            await a.send(hidden(3000, i), [bytes(3000)])
        await following(reader)
        first = await following(reader)
        while reader.read() is None and reader.fileno() >= 0:
            await asyncio.sleep(0.001)
        assert reader.fileno() == -1 and not woken.is_set()
        await asyncio.to_thread(first.release)
        assert woken.is_set()
        second = reader.read()
        assert second is not None and second.header == hidden(3000, 1)
        assert reader.fileno() >= 0
        second.release()
        assert pool.lent_bytes == 0

    run(story, pool)


def test_closing_the_channel_wakes_the_reader_and_frees_everything() -> None:
    pool = BufferPool()

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        await a.send(OPENED)
        await a.send(hidden(3000), [bytes(3000)])
        while len(b._inbox.queue) < 2:
            await asyncio.sleep(0.001)
        reader = taken(b)
        woken = threading.Event()
        reader.attach(woken.set)
        await b.close()
        assert woken.is_set() and reader.fileno() == -1 and pool.lent_bytes == 0
        with pytest.raises(PeerLostError, match="closed by this side"):
            reader.read()
        with pytest.raises(NetworkError):
            while True:
                await a.send(Close(1))

    run(story, pool)


def test_without_a_descriptor_to_spare_the_loop_sends_and_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.dup", none_left)

    async def story(a: StreamChannel, b: StreamChannel) -> None:
        assert not a.send_now(OPENED)
        assert b.take_over() is None
        await a.send(OPENED)
        frame = await b.receive()
        assert frame.header == OPENED

    run(story)
