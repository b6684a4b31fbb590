"""Frames: a header and tensors; the only thing that travels between processes.

Layout, little-endian (docs/protocol.md has the byte table)::

    0   4  magic "SPLM"
    4   1  protocol version
    5   1  reserved, 0
    6   2  number of tensors
    8   4  header length in bytes, H
    12  4  CRC-32 of the header bytes
    16  8  payload length in bytes, P
    24  4  CRC-32 of the payload
    28  4  CRC-32 of bytes 0..27
    32  H  header: msgpack, a tagged array (one of the structs below)
    ..  P  payload: the tensors' bytes one after the other, each padded to 64 bytes
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence

import msgspec

from splitlm.core.errors import ProtocolError, UsageError
from splitlm.core.sampling import Sampling
from splitlm.wire.spec import ITEM_BYTES as ITEM_BYTES
from splitlm.wire.spec import DType as DType
from splitlm.wire.spec import Header as Header
from splitlm.wire.spec import Spec as Spec
from splitlm.wire.training_frames import Backward as Backward
from splitlm.wire.training_frames import Forward as Forward
from splitlm.wire.training_frames import Piece as Piece
from splitlm.wire.training_frames import Scored as Scored
from splitlm.wire.training_frames import Whole as Whole

Buffer = bytes | bytearray | memoryview
MAGIC = b"SPLM"
PROTOCOL = 2
PREFIX = struct.Struct("<4sBBHIIQII")
ALIGN = 64
MAX_HEADER = 64 * 1024
MAX_PAYLOAD = 256 * 1024 * 1024
MAX_TENSORS = 8
MAX_RANK = 8


class Hello(Header, frozen=True, array_like=True, tag=1):
    """Dialler's first frame: who I am, and a nonce. ``claims`` is JSON."""

    purpose: str
    nonce: bytes


class Challenge(Header, frozen=True, array_like=True, tag=2):
    """Listener's answer: its nonce, and proof that it knows the token."""

    nonce: bytes
    proof: bytes


class Answer(Header, frozen=True, array_like=True, tag=3):
    """Dialler's proof that it knows the token, and its claims (JSON)."""

    proof: bytes
    claims: bytes


class Welcome(Header, frozen=True, array_like=True, tag=4):
    """Listener accepts; its claims (JSON), and proof that they are its own."""

    proof: bytes
    claims: bytes


class Refused(Header, frozen=True, array_like=True, tag=5):
    """Either side refuses, with the reason in words. The connection closes after it."""

    reason: str


class Said(Header, frozen=True, array_like=True, tag=8):
    """One control message (JSON); the only frame on the control plane."""

    message: bytes


class Open(Header, frozen=True, array_like=True, tag=16):
    """A session begins. Travels round the ring ahead of its first hidden states.

    Attributes:
        session: its number, chosen by the head.
        context: largest number of tokens it may reach.
        sampling: for the stage that samples.
        logits: whether the sampler returns the logits beside each token (checks only).

    The payload holds the prompt's token ids (int64) only when the sampling needs them.
    """

    session: int
    context: int
    sampling: Sampling
    logits: bool = False


class Hidden(Header, frozen=True, array_like=True, tag=17):
    """Hidden states of ``count`` consecutive positions of one session: one tensor ``[1, count, hidden]``.

    Attributes:
        session: the session's number.
        epoch: of the cut under which the sender computed.
        position: of the first row; explicit, never inferred from a cache.
        sample: whether the last row is to be turned into a token (False for all but a prompt's last chunk).
    """

    session: int
    epoch: int
    position: int
    sample: bool


class Token(Header, frozen=True, array_like=True, tag=18):
    """The way home: one token id, and in checks the logits it was chosen from, ``[vocab]`` float32.

    ``position`` is the token's own place in the sequence.
    """

    session: int
    epoch: int
    position: int
    token: int


class Close(Header, frozen=True, array_like=True, tag=19):
    """A session ends; every stage forgets it. Travels to the last stage."""

    session: int


class Fence(Header, frozen=True, array_like=True, tag=20):
    """Nothing of the head's comes before this one any more: it travels round the ring behind all other frames.

    When it is home, every stage has done what was sent before it.
    """

    number: int


class Failed(Header, frozen=True, array_like=True, tag=21):
    """One session failed on a stage, the others go on. Travels home; stages that it passes forget the session.

    The stage that sends it drops what still comes of the session, until its Close.

    Attributes:
        session: the session's number.
        code: exit code of the error's class (``core.errors``).
        reason: the error's paragraph.
    """

    session: int
    code: int
    reason: str


class Rows(Header, frozen=True, array_like=True, tag=24):
    """KV rows of one block and session that move to a neighbour: keys and values, ``[n, kv_heads, head_dim]`` each.

    Attributes:
        change: number of the change on this link; a higher one replaces what came for those below.
        session: the session's number.
        block: index of the block in the whole model.
        position: of the first row.
    """

    change: int
    session: int
    block: int
    position: int


class Mark(Header, frozen=True, array_like=True, tag=25):
    """Every row of a change has been sent, for the barrier ``seq``; ``sessions`` are (session, tokens seen)."""

    change: int
    seq: int
    sessions: tuple[tuple[int, int], ...]


AnyHeader = (
    Hello
    | Challenge
    | Answer
    | Welcome
    | Refused
    | Said
    | Open
    | Hidden
    | Token
    | Close
    | Fence
    | Failed
    | Rows
    | Mark
    | Forward
    | Backward
    | Scored
    | Piece
    | Whole
)


class Frame:
    """One received frame. ``tensors[i]`` is a view of the bytes of ``header.tensors[i]``, valid until ``release()``.

    Attributes:
        header: what the frame says.
        tensors: one view per tensor; empty after ``release()``.
        nbytes: bytes of the frame on the wire.
        received_ns: ``time.monotonic_ns()`` when its last byte was decoded; 0 when it was not received.
    """

    __slots__ = ("_release", "header", "nbytes", "received_ns", "tensors")

    def __init__(
        self,
        header: AnyHeader,
        tensors: Sequence[memoryview] = (),
        nbytes: int = 0,
        release: Callable[[], None] | None = None,
        received_ns: int = 0,
    ) -> None:
        self.header = header
        self.tensors = tuple(tensors)
        self.nbytes = nbytes
        self.received_ns = received_ns
        self._release = release

    def release(self) -> None:
        """Give the buffers back to their pool; safe to call twice."""
        release, self._release, self.tensors = self._release, None, ()
        if release is not None:
            release()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyHeader)
_ZEROS = bytes(ALIGN)


def padding(nbytes: int) -> int:
    """Bytes from ``nbytes`` to the next multiple of 64."""
    return -nbytes % ALIGN


def payload_bytes(tensors: Sequence[Spec]) -> int:
    """Payload length of these tensors, padding included."""
    return sum(spec.nbytes + padding(spec.nbytes) for spec in tensors)


def encode(header: Header, tensors: Sequence[Buffer] = ()) -> list[Buffer]:
    """One frame as a list of buffers to write in order; the tensors' bytes are not copied.

    Raises:
        ProtocolError: the buffers do not have the sizes that ``header.tensors`` gives, or the frame is over a limit.
    """
    if len(tensors) != len(header.tensors):
        raise ProtocolError(f"{len(tensors)} tensors for {len(header.tensors)} specs")
    head = _encoder.encode(header)
    parts: list[Buffer] = []
    crc = size = 0
    for spec, data in zip(header.tensors, tensors, strict=True):
        view = memoryview(data).cast("B")
        if view.nbytes != spec.nbytes:
            raise ProtocolError(f"A tensor of {view.nbytes} bytes", expected=f"{spec.nbytes} bytes for {spec}")
        parts.append(view)
        crc = zlib.crc32(view, crc)
        if pad := padding(view.nbytes):
            parts.append(_ZEROS[:pad])
            crc = zlib.crc32(_ZEROS[:pad], crc)
        size += view.nbytes + pad
    check_limits(len(header.tensors), len(head), size)
    prefix = PREFIX.pack(MAGIC, PROTOCOL, 0, len(tensors), len(head), zlib.crc32(head), size, crc, 0)[:-4]
    return [prefix + zlib.crc32(prefix).to_bytes(4, "little") + head, *parts]


def check_limits(count: int, header_bytes: int, payload: int, where: str = "") -> None:
    """Refuse sizes that no frame may have.

    Raises:
        ProtocolError: naming the size and the limit.
    """
    if count <= MAX_TENSORS and header_bytes <= MAX_HEADER and payload <= MAX_PAYLOAD:
        return
    for name, size, limit in (
        ("tensors", count, MAX_TENSORS),
        ("header bytes", header_bytes, MAX_HEADER),
        ("payload bytes", payload, MAX_PAYLOAD),
    ):
        if size > limit:
            raise ProtocolError(
                f"A frame with {size} {name}",
                where=where,
                expected=f"at most {limit}",
                remedy="Use a smaller --prefill-chunk",
            )


def decode_header(data: Buffer, where: str = "") -> AnyHeader:
    """A frame's header from its bytes, strictly typed.

    Raises:
        ProtocolError: an unknown kind of frame, or a field of the wrong type.
    """
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, UsageError) as error:
        raise ProtocolError(
            f"A frame's header could not be read: {error}",
            where=where,
            expected=f"a frame of protocol version {PROTOCOL}",
        ) from error
