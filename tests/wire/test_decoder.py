"""Any split gives the same frames; no damage passes; nobody makes us allocate."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitlm.core.errors import ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.wire import frame as wire
from splitlm.wire.decoder import GREETING_HEADER, READ_AHEAD, Decoder
from splitlm.wire.frame import Close, Frame, Header, Hello, Hidden, Open, Said, Spec, Token, encode
from splitlm.wire.pool import SMALLEST, BufferPool

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def hidden(n: int, position: int = 0) -> tuple[Header, list[bytes]]:
    return Hidden(1, 0, position, True, tensors=(Spec("uint8", (n,)),)), [bytes(i * 7 % 251 for i in range(n))]


def stream(frames: Sequence[tuple[Header, Sequence[bytes]]]) -> bytes:
    return b"".join(b"".join(encode(header, tensors)) for header, tensors in frames)


def told(frames: Sequence[Frame]) -> list[tuple[Header, list[bytes]]]:
    return [(f.header, [bytes(t) for t in f.tensors]) for f in frames]


def build(
    head: bytes,
    *,
    payload: bytes = b"",
    count: int = 0,
    magic: bytes = b"SPLM",
    version: int = 2,
    reserved: int = 0,
    head_bytes: int | None = None,
    size: int | None = None,
    head_crc: int = 0,
    crc: int = 0,
    own_crc: int = 0,
) -> bytes:
    """A frame by hand, right in all but what a test asks for; the CRC arguments are XORed onto the true ones."""
    prefix = struct.pack(
        "<4sBBHIIQI",
        magic,
        version,
        reserved,
        count,
        len(head) if head_bytes is None else head_bytes,
        zlib.crc32(head) ^ head_crc,
        len(payload) if size is None else size,
        zlib.crc32(payload) ^ crc,
    )
    return prefix + struct.pack("<I", zlib.crc32(prefix) ^ own_crc) + head + payload


def header_bytes(header: Header) -> bytes:
    return encode(header)[0][32:] if not header.tensors else wire._encoder.encode(header)


CLOSE = header_bytes(Close(1))
MIXED: list[tuple[Header, list[bytes]]] = [
    (Hello("data", b"n" * 32), []),
    hidden(1),
    (Open(1, 99, Sampling(seed=5), tensors=(Spec("int64", (4,)),)), [bytes(range(32))]),
    hidden(0),
    hidden(READ_AHEAD + 5000),
    hidden(64, 3),
    (Token(1, 2, 3, 4, tensors=(Spec("float32", (2, 3)), Spec("int32", ()))), [b"x" * 24, b"four"]),
    (Said(b"m" * 40_000), []),
    (Close(1), []),
]


@quick
@given(st.lists(st.integers(1, 30_000), max_size=40))
def test_any_split_gives_the_same_frames(cuts: list[int]) -> None:
    data, frames, at = stream(MIXED), [], 0
    decoder = Decoder(BufferPool())
    for n in [*cuts, len(data)]:
        frames += decoder.feed(data[at : at + n])
        at += n
    assert told(frames) == MIXED
    assert decoder.partial_bytes == 0


def test_one_byte_at_a_time() -> None:
    data = stream([*MIXED[:4], *MIXED[5:7]])
    decoder = Decoder(BufferPool())
    frames = [f for i in range(len(data)) for f in decoder.feed(data[i : i + 1])]
    assert told(frames) == [*MIXED[:4], *MIXED[5:7]]


def test_a_large_payload_is_received_into_its_own_buffer() -> None:
    """Past the first read the decoder hands out the payload's own memory, up to the frame's end and no further."""
    header, tensors = hidden(1 << 20)
    data = stream([(header, tensors), hidden(3)])
    decoder = Decoder(BufferPool())
    room = decoder.get_buffer()
    room[:] = data[: room.nbytes]
    assert decoder.buffer_updated(room.nbytes) == []
    at = room.nbytes
    rest = decoder.get_buffer()
    assert rest.nbytes == len(stream([(header, tensors)])) - at
    rest[:] = data[at : at + rest.nbytes]
    at += rest.nbytes
    [got] = decoder.buffer_updated(rest.nbytes)
    room = decoder.get_buffer()
    room[: len(data) - at] = data[at:]
    [small] = decoder.buffer_updated(len(data) - at)
    assert told([got, small]) == [(header, tensors), hidden(3)]


def test_frames_carry_their_size_and_the_time_of_their_last_byte() -> None:
    import time

    data = stream([hidden(100)])
    decoder = Decoder(BufferPool())
    decoder.feed(data[:-1])
    before = time.monotonic_ns()
    [got] = decoder.feed(data[-1:])
    assert before <= got.received_ns <= time.monotonic_ns()
    assert got.nbytes == len(data)


def test_release_gives_the_buffer_back_once() -> None:
    pool = BufferPool()
    frames = Decoder(pool).feed(stream([hidden(100), hidden(5000)]))
    assert pool.lent_bytes == 4096 + 8192
    frames[0].release()
    frames[0].release()
    assert frames[0].tensors == ()
    assert pool.lent_bytes == 8192


@pytest.mark.parametrize("kind", [(Close(1), []), hidden(2)])
def test_no_flipped_bit_passes(kind: tuple[Header, list[bytes]]) -> None:
    good = stream([kind])
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        pool = BufferPool(1 << 16)
        decoder = Decoder(pool)
        with pytest.raises(ProtocolError):
            decoder.feed(bad)
        assert pool.lent_bytes == 0


@quick
@given(st.binary(max_size=400), st.booleans(), st.booleans())
def test_garbage_is_a_protocol_error_and_allocates_nothing(data: bytes, greeting: bool, disguised: bool) -> None:
    pool = BufferPool(1 << 16)
    decoder = Decoder(pool, "a stranger", greeting=greeting)
    try:
        frames = decoder.feed((b"SPLM\x01" if disguised else b"") + data)
    except ProtocolError as error:
        assert "a stranger" in str(error)
    else:
        assert frames == []
    assert pool.held_bytes == 0


@quick
@given(st.binary(max_size=200))
def test_a_header_of_garbage_with_true_checksums_is_a_protocol_error(head: bytes) -> None:
    """A peer that knows the layout: the header's own decoder is the only guard."""
    try:
        frames = Decoder(BufferPool(1 << 16), "p").feed(build(head))
    except ProtocolError as error:
        assert "p:" in str(error)
    else:
        assert all(isinstance(f.header, Header) for f in frames)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", r"not a splitlm frame.*b'GET '"),
        (b"XPLM", "not a splitlm frame"),
        (build(CLOSE, version=1), "protocol version 1 came.*Expected protocol version 2"),
        (build(CLOSE, version=1)[:5], "protocol version 1 came.*Expected protocol version 2"),
        (build(CLOSE, own_crc=1), "prefix is damaged"),
        (build(CLOSE, head_crc=1), "header is damaged"),
        (build(CLOSE, reserved=1), "reserved byte is 1"),
        (build(CLOSE, crc=1), "payload of a Close frame is damaged"),
        (build(CLOSE, payload=bytes(64)), "Close frame has 64 payload bytes.*Expected the 0 bytes"),
        (build(CLOSE, count=1), "Close frame has 0 tensors.*Expected 1"),
        (build(CLOSE, count=9), "9 tensors.*at most 8"),
        (build(CLOSE, head_bytes=64 * 1024 + 1), "65537 header bytes.*at most 65536"),
        (build(CLOSE, size=256 * 1024 * 1024 + 1), "268435457 payload bytes.*at most 268435456"),
        (build(b"\x92\x63\x01"), "header could not be read"),
        (build(b""), "header could not be read"),
        (build(b"\x94\x13\x01\x90" + b"\x91" * 4000 + b"\x90"), "header could not be read"),
    ],
)
def test_each_violation_names_peer_what_came_and_what_was_expected(data: bytes, words: str) -> None:
    decoder = Decoder(BufferPool(), "stage 1 at 10.0.0.2:4000")
    with pytest.raises(ProtocolError, match=f"^stage 1 at 10.0.0.2:4000: .*{words}"):
        decoder.feed(data)
    with pytest.raises(ProtocolError, match=words):
        decoder.feed(stream([hidden(1)]))


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((-64,), "-64 as a side"),
        ((-1, -64), "-1 as a side"),
        ((1,) * 9, "9 dimensions"),
        ((2**63, 2), "bytes of its"),
    ],
)
def test_impossible_shapes_are_refused(shape: tuple[int, ...], words: str) -> None:
    head = header_bytes(Hidden(1, 0, 0, True, tensors=(Spec("uint8", shape),)))
    pool = BufferPool(1 << 20)
    with pytest.raises(ProtocolError, match=words):
        Decoder(pool, "p").feed(build(head, payload=bytes(64), count=1))
    assert pool.held_bytes == 0


def test_good_frames_before_a_bad_one_are_delivered_first() -> None:
    decoder = Decoder(BufferPool())
    assert told(decoder.feed(stream([hidden(3), hidden(4)]) + b"garbage!")) == [hidden(3), hidden(4)]
    with pytest.raises(ProtocolError, match="not a splitlm frame"):
        decoder.feed()


def test_a_stranger_gets_small_limits_until_admitted() -> None:
    big = stream([(Said(b"x" * GREETING_HEADER), [])])
    for data in (big, stream([hidden(1)]), build(CLOSE, size=64)[:32]):
        pool = BufferPool()
        with pytest.raises(ProtocolError, match="before the handshake was done"):
            Decoder(pool, greeting=True).feed(data)
        assert pool.held_bytes == 0
    decoder = Decoder(BufferPool(), greeting=True)
    assert len(decoder.feed(stream([(Hello("data", b"x" * 3000), [])]))) == 1
    decoder.admit()
    assert len(decoder.feed(big + stream([hidden(1)]))) == 2


def test_a_frame_may_be_admitted_between_two_that_came_in_one_read() -> None:
    decoder = Decoder(BufferPool(), greeting=True)
    data = stream([(Hello("data", b"x"), []), hidden(9)])
    decoder.get_buffer()[: len(data)] = data
    decoder.received(len(data))
    assert decoder.next_frame() is not None
    decoder.admit()
    got = decoder.next_frame()
    assert got is not None
    assert told([got]) == [hidden(9)]


@quick
@given(st.lists(st.integers(1, 3 * SMALLEST), min_size=1, max_size=12), st.integers(1, 9000))
def test_an_empty_pool_holds_bytes_back_and_loses_none(sizes: list[int], step: int) -> None:
    sent = [hidden(n, i) for i, n in enumerate(sizes)]
    data = stream(sent)
    pool = BufferPool(4 * SMALLEST)
    decoder = Decoder(pool)
    got: list[tuple[Header, list[bytes]]] = []
    held: list[Frame] = []
    for at in range(0, len(data), step):
        held += decoder.feed(data[at : at + step])
        assert pool.held_bytes <= 4 * SMALLEST
    while held or decoder.starved:
        assert held, "starved with every buffer free"
        first = held.pop(0)
        got += told([first])
        first.release()
        held += decoder.feed()
    assert got == sent
    assert pool.lent_bytes == 0


def test_a_frame_that_can_never_fit_the_pool_is_refused_not_waited_for() -> None:
    with pytest.raises(ProtocolError, match="receive buffers of 8192 bytes"):
        Decoder(BufferPool(8192)).feed(stream([hidden(8193)]))


def test_truncation_leaves_a_partial_frame_and_close_gives_its_buffer_back() -> None:
    data = stream([hidden(5000)])
    for n in (1, 31, 40, len(data) - 1):
        pool = BufferPool()
        decoder = Decoder(pool)
        assert decoder.feed(data[:n]) == []
        assert decoder.partial_bytes == n
        decoder.close()
        assert pool.lent_bytes == 0
        assert decoder.partial_bytes == 0


def test_encode_refuses_what_decode_would() -> None:
    header, _ = hidden(10)
    with pytest.raises(ProtocolError, match="0 tensors for 1 specs"):
        encode(header)
    with pytest.raises(ProtocolError, match=r"A tensor of 9 bytes.*10 bytes"):
        encode(header, [bytes(9)])
    with pytest.raises(ProtocolError, match=r"header bytes.*at most 65536"):
        encode(Said(bytes(65536)))
    with pytest.raises(ProtocolError, match="9 tensors"):
        encode(Hidden(1, 0, 0, True, tensors=(Spec("uint8", (1,)),) * 9), [b"x"] * 9)
