"""Bytes that go wrong on the way between two stages, strangers at a stage's door, and links that are slow or stuck."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from splitlm import Ring
from splitlm.core.errors import NetworkError, PeerRefusedError
from splitlm.link import tcp
from splitlm.node.identity import stranger
from splitlm.wire.frame import Hello, encode
from splitlm.wire.handshake import Identity
from tests.faults.proxy import Mangle, Proxy
from tests.faults.scene import HOST, PROMPT, SOON_S, ThreadStage, Wounded, fixed, free_ports, nothing_left

pytestmark = pytest.mark.timeout(60)
BLOCKS = [(0, 2), (2, 4), (4, -1)]
AFTER = 20_000
"""Bytes of a link that pass before the damage: the handshake, the prompt and some tokens."""


@pytest.fixture(scope="module")
def expected(stories: Path) -> str:
    """The text of the uncut model."""
    with Ring(str(stories), threads=1) as ring:
        return ring.generate(PROMPT, max_new_tokens=300).text


@contextlib.contextmanager
def damaged(stories: Path, **how: object) -> Iterator[tuple[Wounded, list[ThreadStage], Proxy]]:
    """An open ring of three whose link from node 1 to node 2 passes a proxy."""
    (port,) = free_ports(1)
    ring, stages, data = fixed(stories, BLOCKS, sends={1: port})
    with Proxy(port, data[2], **how) as proxy, ring:  # type: ignore[arg-type]
        yield ring, stages, proxy


def flip(data: bytes, at: int) -> bytes:
    """One bit, once."""
    if at <= AFTER < at + len(data):
        bad = bytearray(data)
        bad[AFTER - at] ^= 1
        return bytes(bad)
    return data


def insert(data: bytes, at: int) -> bytes:
    """One byte too many."""
    return data[: AFTER - at] + b"!" + data[AFTER - at :] if at <= AFTER < at + len(data) else data


def noise(data: bytes, at: int) -> bytes:
    """From some place on, anything."""
    return secrets.token_bytes(len(data)) if at > AFTER else data


def end(data: bytes, at: int) -> bytes | None:
    """The stream ends in the middle of a frame."""
    return data if at + len(data) <= AFTER else None


@pytest.mark.parametrize("mangle", [flip, insert, noise, end], ids=lambda m: m.__name__)
def test_a_damaged_stream_ends_the_ring_by_name_and_makes_no_token(
    mangle: Mangle, stories: Path, expected: str
) -> None:
    with nothing_left():
        pieces = []
        with damaged(stories, mangle=mangle) as (ring, stages, _):
            with pytest.raises(NetworkError) as caught:
                pieces.extend(ring.stream(PROMPT, max_new_tokens=300))
            text = str(caught.value)
            assert "stage 1" in text or "stage 2" in text or "Node 1" in text or "Node 2" in text, text
            if mangle is not end:
                assert any(word in text for word in ("damaged", "magic", "frame", "CRC", "refused")), text
        got = "".join(pieces)
        assert expected.startswith(got)
        assert got != expected
        for stage in stages:
            error = stage.join()
            assert error is not None
            assert error.exit_code == 3


def test_strangers_at_a_stages_door_are_ignored(stories: Path, expected: str) -> None:
    with nothing_left():
        ring, stages, data = fixed(stories, BLOCKS)
        hello = b"".join(bytes(part) for part in encode(Hello(purpose="data", nonce=bytes(32))))
        lines = [b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(5000), b"SPLM" + b"\xff" * 60, hello[:20], hello, b""]
        with ring:
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(ring.generate, PROMPT, max_new_tokens=300)
                for port in [*data, ring.settings.listen[1]]:  # type: ignore[union-attr]
                    for line in lines:
                        with contextlib.suppress(OSError), socket.create_connection((HOST, port), 5) as sock:
                            sock.sendall(line)
                assert job.result(60).text == expected

            async def liar() -> None:
                me = Identity(stranger("liar"), "another token")
                await tcp.connect(HOST, ring.settings.listen[1], me, "control", deadline_s=5, who="head")  # type: ignore[union-attr]

            with pytest.raises(PeerRefusedError, match="tokens differ"):
                asyncio.run(liar())
            assert ring.generate(PROMPT, max_new_tokens=300).text == expected
        assert [stage.join() for stage in stages] == [None, None]


def test_a_stuck_link_holds_the_tokens_but_not_the_owner(stories: Path) -> None:
    with nothing_left():
        with damaged(stories) as (ring, stages, proxy):
            stream = ring.stream(PROMPT, max_new_tokens=300)
            next(stream)
            proxy.stall = True
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(list, stream)
                time.sleep(0.3)
                assert not job.done()
                begun = time.monotonic()
                ring.close()
                assert time.monotonic() - begun < SOON_S
                with pytest.raises(NetworkError, match="was closed"):
                    job.result(SOON_S)
            proxy.stall = False
        for stage in stages:
            stage.join()


def test_a_slow_private_ring_with_long_prompts_does_not_deadlock(tiny: Callable[[str], Path]) -> None:
    """Six sessions of which each fills the link for a while: who waits for whom is no circle."""
    folder = tiny("llama")
    prompts = [[1, *range(20 + i, 110 + i)] for i in range(6)]
    with Ring(str(folder), threads=1, prefill_chunk=8) as ring:
        alone = [ring.generate(p, max_new_tokens=6, ignore_eos=True).tokens for p in prompts]
    first, second = free_ports(2)
    with nothing_left():
        ring, stages, data = fixed(
            folder, [(0, 2), (2, 4), (4, -1)], sends={0: first, 1: second}, private=True, prefill_chunk=8
        )
        slow = {"delay_s": 0.002, "rate": 300_000.0}
        with Proxy(first, data[1], **slow), Proxy(second, data[2], **slow), ring, ThreadPoolExecutor(6) as pool:
            jobs = [pool.submit(ring.generate, p, max_new_tokens=6, ignore_eos=True) for p in prompts]
            assert [job.result(60).tokens for job in jobs] == alone
        assert [stage.join() for stage in stages] == [None, None]


@pytest.mark.parametrize("late", [None, 0, 1, 2])
@pytest.mark.parametrize("wires", [{0: 2, 2: 1, 1: 0}, {0: 2}, {1: 1}])
def test_stages_wired_in_another_order_are_refused_by_their_numbers(
    wires: dict[int, int], late: int | None, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All shapes would agree, and the text would be nonsense. Whoever comes late finds the door open, and hears it."""
    connect = tcp.connect

    async def slowly(host: str, port: int, identity: Identity, *rest: object, **options: object) -> object:
        if identity.claims.place == late:
            await asyncio.sleep(0.3)
        return await connect(host, port, identity, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tcp, "connect", slowly)
    with nothing_left():
        ring, stages, _ = fixed(stories, BLOCKS, wires=wires)
        with pytest.raises(NetworkError, match=r"Node \d met node \d, which expects node \d.*--send"):
            ring.open()
        for stage in stages:
            error = stage.join()
            assert error is not None
            assert error.exit_code == 3
