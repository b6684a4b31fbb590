"""Silence is noticed, life is not mistaken for silence, and what is not a message ends a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from splitlm.bus.base import PeerCame, PeerGone
from splitlm.bus.star import StarHub, StarSpoke
from splitlm.core.errors import PeerLostError, ProtocolError
from splitlm.core.messages import Stop, Trouble
from splitlm.link.memory import MemoryListener, connect
from splitlm.wire.channel import Channel
from splitlm.wire.frame import PROTOCOL, Said
from splitlm.wire.handshake import Claims, Identity

BEAT, SILENCE = 0.02, 0.4
NESTED = b'{"kind":"ping","x":' + b"[" * 4000 + b"]" * 4000 + b"}"


def note(number: int) -> Trouble:
    """Some message."""
    return Trouble(number, "note")


def identity(name: str) -> Identity:
    return Identity(Claims(node=name, version="1", protocol=PROTOCOL))


def run(story: Callable[[StarHub, Channel], Awaitable[None]]) -> None:
    """A hub, and the bare channel of one peer whose arrival was told."""

    async def main() -> None:
        before = asyncio.all_tasks()
        async with asyncio.timeout(30):
            listener = MemoryListener(identity("hub"), "control")
            hub = StarHub(listener, heartbeat_s=BEAT, timeout_s=SILENCE)
            channel = await connect(listener, identity("stage 1"), "control")
            assert isinstance((await hub.receive())[1], PeerCame)
            try:
                await story(hub, channel)
            finally:
                await asyncio.gather(hub.close(), channel.close())
        assert asyncio.all_tasks() == before

    asyncio.run(main())


def test_a_silent_peer_is_gone_with_its_name_and_the_seconds() -> None:
    async def story(hub: StarHub, channel: Channel) -> None:
        peer, gone = await hub.receive()
        assert isinstance(gone, PeerGone)
        assert gone.name == "stage 1"
        assert gone.silent_s >= SILENCE * 0.9
        assert f"silent for {SILENCE:g} s" in gone.reason
        assert "stage 1" in gone.reason
        with pytest.raises(PeerLostError):
            await hub.send(peer, Stop())

    run(story)


def test_a_spoke_that_says_nothing_stays_by_its_heartbeat() -> None:
    async def story(hub: StarHub, channel: Channel) -> None:
        spoke = StarSpoke(channel, heartbeat_s=BEAT, timeout_s=SILENCE)
        await asyncio.sleep(3 * SILENCE)
        await spoke.send(note(1))
        assert (await hub.receive())[1] == note(1)
        await spoke.close()

    run(story)


def test_any_message_is_a_sign_of_life() -> None:
    async def story(hub: StarHub, channel: Channel) -> None:
        spoke = StarSpoke(channel, heartbeat_s=1000, timeout_s=1000)
        for i in range(12):
            await asyncio.sleep(SILENCE / 4)
            await spoke.send(note(i))
        for i in range(12):
            assert (await hub.receive())[1] == note(i)
        await spoke.close()

    run(story)


def test_a_spoke_notices_a_silent_hub() -> None:
    async def main() -> None:
        listener = MemoryListener(identity("hub"), "control")
        channel = await connect(listener, identity("stage 1"), "control")
        hub = await listener.accept()  # and says nothing
        spoke = StarSpoke(channel, heartbeat_s=BEAT, timeout_s=SILENCE)
        with pytest.raises(PeerLostError, match=rf"hub at memory: The peer was silent for {SILENCE:g} s"):
            await spoke.receive()
        await asyncio.gather(spoke.close(), hub.close(), listener.close())

    asyncio.run(main())


@pytest.mark.parametrize("data", [b"", b"{}", b'{"kind":"reboot"}', b'{"kind":"trouble","code":"x"}', b"\xff", NESTED])
def test_what_is_not_a_message_ends_the_peer_and_no_other(data: bytes) -> None:
    async def story(hub: StarHub, channel: Channel) -> None:
        await channel.send(Said(data))
        _, gone = await hub.receive()
        assert isinstance(gone, PeerGone)
        assert "could not be read" in gone.reason
        with pytest.raises(PeerLostError):
            while True:
                await channel.receive()
        other = StarSpoke(await connect(hub._listener, identity("stage 2"), "control"))
        assert (await hub.receive())[1] == PeerCame("stage 2", "memory")
        await other.close()

    run(story)


def test_a_spoke_learns_what_was_wrong_with_the_hub() -> None:
    async def main() -> None:
        listener = MemoryListener(identity("hub"), "control")
        spoke = StarSpoke(await connect(listener, identity("stage 1"), "control"))
        hub = await listener.accept()
        await hub.send(Said(b"[]"))
        with pytest.raises(ProtocolError, match="could not be read"):
            await spoke.receive()
        await asyncio.gather(spoke.close(), hub.close(), listener.close())

    asyncio.run(main())
