"""The contract of channels holds through a broker too; and what is a broker's own: bounds, and an end without one."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from splitlm.bus import address
from splitlm.core.errors import PeerLostError, PeerMissingError, PeerRefusedError
from splitlm.link import rabbitmq
from splitlm.link.base import StreamChannel
from splitlm.link.pipe import CHUNK, WINDOW
from splitlm.wire.frame import Said
from splitlm.wire.handshake import Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose
from tests.bus.server import Broker, access
from tests.link import test_channel
from tests.link.test_channel import OPENED, claims, hidden

STORIES: tuple[Callable[..., None], ...] = (
    test_channel.test_frames_arrive_in_order_and_whole,
    test_channel.test_a_tensor_may_be_overwritten_once_it_was_sent,
    test_channel.test_large_tensors_both_ways_at_once_do_not_deadlock,
    test_channel.test_a_reader_that_stops_holds_the_sender_back,
    test_channel.test_small_frames_beyond_the_bound_wait_in_the_decoder,
    test_channel.test_an_empty_pool_pauses_reading_until_another_thread_releases,
    test_channel.test_a_closed_channel_says_so_and_closing_again_is_nothing,
    test_channel.test_closing_gives_unread_frames_back_and_wakes_the_reader,
    test_channel.test_a_peer_killed_in_the_middle_of_a_frame,
    test_channel.test_a_violation_is_told_to_both_sides_after_the_good_frames,
    test_channel.test_a_frame_out_of_turn_is_not_sent,
    test_channel.test_a_cancelled_receive_loses_nothing_and_two_readers_are_a_mistake,
)
WITH_PATIENCE: tuple[Callable[..., None], ...] = (
    test_channel.test_what_was_sent_before_closing_arrives_then_the_loss_is_named,
    test_channel.test_a_sender_held_back_by_a_peer_that_leaves_is_let_go,
    test_channel.test_closing_does_not_wait_long_for_a_peer_that_does_not_read,
)


@asynccontextmanager
async def pair(
    broker: Broker, kind: str = "amqp", purpose: Purpose = "data", pool: BufferPool | None = None
) -> AsyncIterator[tuple[StreamChannel, StreamChannel]]:
    """As ``test_channel.pair``: dialler and listener, each with a connection of its own; no task may be left."""
    before, door = asyncio.all_tasks(), f"splitlm.{secrets.token_hex(4)}"
    near, far = [await address.connect(access(broker), name) for name in "ab"]
    listener = await rabbitmq.listen(far, door, Identity(claims("b")), purpose, pool=pool)
    a = await rabbitmq.connect(near, door, Identity(claims("a")), purpose, deadline_s=10, who="b")
    b = await listener.accept()
    await listener.close()
    try:
        yield a, b
    finally:
        await asyncio.gather(a.close(), b.close())
        assert a.lost.done() and b.lost.done()
        await asyncio.gather(near.close(), far.close())
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_the_contract(story: Callable[..., None], rabbit: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_channel, "pair", partial(pair, rabbit))
    story("amqp")


@pytest.mark.parametrize("story", WITH_PATIENCE, ids=lambda story: story.__name__)
def test_the_contract_with_patience(
    story: Callable[..., None], rabbit: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_channel, "pair", partial(pair, rabbit))
    story("amqp", monkeypatch)


def test_no_more_than_a_window_waits_at_the_broker(rabbit: Broker) -> None:
    """Counted where it arrives: while nothing is taken, the sender stops after a window, and goes on afterwards."""

    async def main() -> None:
        async with asyncio.timeout(60), pair(rabbit) as (a, b):
            transport: Any = b._transport
            size = 4 * WINDOW * CHUNK
            transport.pause_reading()
            sending = asyncio.create_task(_send(a, size))
            while len(transport._inbound) < WINDOW:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert len(transport._inbound) == WINDOW
            assert sum(map(len, transport._inbound)) <= WINDOW * CHUNK
            assert not sending.done()
            transport.resume_reading()
            assert (await b.receive()).header == OPENED
            frame = await b.receive()
            assert frame.header == hidden(size) and bytes(frame.tensors[0][-3:]) == b"\1\1\1"
            frame.release()
            await sending

    asyncio.run(main())


async def _send(a: StreamChannel, size: int) -> None:
    await a.send(OPENED)
    await a.send(hidden(size), [b"\1" * size])


def test_who_has_another_token_is_refused_and_who_is_not_there_is_named(rabbit: Broker) -> None:
    async def main() -> None:
        connection = await address.connect(access(rabbit), "test")
        door = f"splitlm.{secrets.token_hex(4)}"
        with pytest.raises(PeerMissingError, match=r"waited 0\.5 s for the aggregator"):
            await rabbitmq.connect(
                connection, door, Identity(claims("a")), "state", deadline_s=0.5, who="the aggregator"
            )
        listener = await rabbitmq.listen(connection, door, Identity(claims("b"), "right"), "state")
        with pytest.raises(PeerRefusedError, match="token"):
            await rabbitmq.connect(
                connection, door, Identity(claims("a"), "wrong"), "state", deadline_s=20, who="the aggregator"
            )
        await listener.close()
        await connection.close()

    asyncio.run(main())


def test_a_connection_that_ends_takes_its_links_with_it(rabbit: Broker) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            near, far = [await address.connect(access(rabbit), name) for name in "ab"]
            door = f"splitlm.{secrets.token_hex(4)}"
            listener = await rabbitmq.listen(far, door, Identity(claims("b")), "control")
            a = await rabbitmq.connect(near, door, Identity(claims("a")), "control", deadline_s=10, who="b")
            b = await listener.accept()
            await near.close()
            with pytest.raises(PeerLostError, match="the broker was lost"):
                await a.receive()
            with pytest.raises(PeerLostError):  # its queue is gone, which the next word finds out
                while True:
                    await b.send(Said(b"x"))
                    await asyncio.sleep(0.01)
            await asyncio.gather(a.close(), b.close())
            await listener.close()
            await far.close()

    asyncio.run(main())
