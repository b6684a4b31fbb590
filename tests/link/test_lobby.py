"""What every listener owes its peers, over a pipe in memory."""

from __future__ import annotations

import asyncio

import pytest

from splitlm.core.errors import NetworkError
from splitlm.link import lobby, memory
from splitlm.link.base import StreamChannel
from splitlm.wire.handshake import Handshake, Identity
from splitlm.wire.pool import BufferPool
from tests.link.test_channel import claims


def dialler() -> StreamChannel:
    me = Identity(claims("a"))
    return StreamChannel(
        "dialler", "control", "memory", BufferPool(), handshake=Handshake("dialler", "control", me, "memory")
    )


def test_a_connection_that_comes_about_after_the_end_is_cut() -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            hall, near = lobby.Lobby(Identity(claims("b")), "control"), dialler()
            far = hall.admit("memory")
            assert far is not None
            await hall.close()
            memory.join(near, far)
            await asyncio.gather(near.lost, far.lost)
            with pytest.raises(NetworkError, match="The listener was closed"):
                await hall.accept("memory")
            assert not hall.unfinished and hall.admit("memory") is None

    asyncio.run(main())


def test_who_left_before_it_was_accepted_is_passed_over() -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            listener = memory.MemoryListener(Identity(claims("b")), "control")
            gone = await memory.connect(listener, Identity(claims("gone")), "control")
            await gone.close()
            stays = await memory.connect(listener, Identity(claims("stays")), "control")
            came = await listener.accept()
            assert came.claims.node == "stays"
            await asyncio.gather(listener.close(), stays.close(), came.close())

    asyncio.run(main())


def test_who_says_nothing_is_dropped_in_time_and_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lobby, "MAX_UNFINISHED", 1)

    async def main() -> None:
        async with asyncio.timeout(20):
            hall, near = lobby.Lobby(Identity(claims("b")), "control", handshake_s=0.05), dialler()
            far = hall.admit("memory")
            assert far is not None and hall.admit("memory") is None
            mute = asyncio.BufferedProtocol()
            a, b = memory.MemoryTransport(mute), memory.MemoryTransport(far)
            b.attach(a)
            await asyncio.wait({far.settled})
            assert "not finished in time" in str(far.error)
            again = hall.admit("memory")
            assert again is not None
            memory.join(near, again)
            assert (await hall.accept("memory")) is again
            await asyncio.gather(hall.close(), near.close(), again.close(), far.close())

    asyncio.run(main())
