"""Several frames in one write: all of them or none, and only where nothing has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from splitlm.core.errors import ProtocolError
from splitlm.link.base import StreamChannel
from splitlm.wire.frame import Buffer, Fence, Header, Mark
from tests.link.test_channel import OPENED, Story, hidden, pair

FRAMES: list[tuple[Header, Sequence[Buffer]]] = [(hidden(3, i), [bytes([i]) * 3]) for i in range(5)]


def run(kind: str, story: Story) -> None:
    async def main() -> None:
        async with asyncio.timeout(30), pair(kind) as (a, b):
            await a.send(OPENED)
            assert (await b.receive()).header == OPENED
            await story(a, b)

    asyncio.run(main())


def test_they_come_together_and_in_order() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        before = a.bytes_out
        sizes = a.send_together([*FRAMES, (Fence(1), [])])
        assert len(sizes) == 6 and sum(sizes) == a.bytes_out - before
        for (header, tensors), size in zip(FRAMES, sizes, strict=False):
            frame = await b.receive()
            assert (frame.header, frame.nbytes, bytes(frame.tensors[0])) == (header, size, tensors[0])
            assert b.pending
        assert (await b.receive()).header == Fence(1)

    run("tcp", story)


@pytest.mark.parametrize("case", ["memory", "large", "closed"])
def test_where_they_have_to_wait_none_is_sent(case: str) -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        frames = [*FRAMES, (hidden(70_000), [bytes(70_000)])] if case == "large" else FRAMES
        if case == "closed":
            await b.close()
            await asyncio.wait({a.lost})
        before = a.bytes_out
        assert a.send_together(frames) == []
        assert a.bytes_out == before
        if case != "closed":
            await a.send(Fence(2))
            assert (await b.receive()).header == Fence(2)

    run("memory" if case == "memory" else "tcp", story)


def test_a_frame_out_of_turn_among_them_stops_all() -> None:
    async def story(a: StreamChannel, b: StreamChannel) -> None:
        with pytest.raises(ProtocolError):
            a.send_together([*FRAMES, (Mark(change=1, seq=1, sessions=()), [])])
        await a.send(Fence(3))
        assert (await b.receive()).header == Fence(3)

    run("tcp", story)
