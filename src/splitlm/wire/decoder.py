"""Bytes in, frames out; no sockets.

The decoder has the shape of ``asyncio.BufferedProtocol``: it hands out the buffer into which the next bytes go. Between
frames that is a small read-ahead buffer, so that a small frame costs one read; what a read brings of a payload beyond
its header (at most ``READ_AHEAD`` bytes) is moved to the payload's own buffer, and the rest is received there directly.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from splitlm.core.errors import ProtocolError
from splitlm.wire.frame import (
    MAGIC,
    MAX_RANK,
    PREFIX,
    PROTOCOL,
    AnyHeader,
    Buffer,
    Frame,
    Spec,
    check_limits,
    decode_header,
    padding,
    payload_bytes,
)
from splitlm.wire.pool import BufferPool, Lease

READ_AHEAD = 16 * 1024
GREETING_HEADER = 4 * 1024
"""Largest header in bytes before the handshake is done; a payload is not allowed at all before that."""


class Decoder:
    """Turns one peer's byte stream into frames.

    Args:
        pool: where payload buffers come from.
        where: the peer, for messages; may be set anew when its name becomes known.
        greeting: apply the small limits of strangers until ``admit()``.

    After a ProtocolError the stream is lost: every later call raises the same error.
    """

    def __init__(self, pool: BufferPool, where: str = "", *, greeting: bool = False) -> None:
        self.where = where
        self._pool = pool
        self._greeting = greeting
        self._ahead = memoryview(bytearray(READ_AHEAD))
        self._begin = self._end = 0
        self._prefix: tuple[int, int, int, int, int] | None = None
        self._header: AnyHeader | None = None
        self._lease: Lease | None = None
        self._filled = self._crc = 0
        self._starved = False
        self._failure: ProtocolError | None = None
        self._backlog = bytearray()

    @property
    def starved(self) -> bool:
        """The pool has no room for the payload that comes next: pause reading, call ``next_frame`` after a release."""
        return self._starved

    @property
    def partial_bytes(self) -> int:
        """Bytes received of a frame that is not complete."""
        head = PREFIX.size + self._prefix[1] if self._header is not None and self._prefix else 0
        return head + self._filled + self._end - self._begin

    def admit(self) -> None:
        """The handshake is done: lift the limits of strangers."""
        self._greeting = False

    def close(self) -> None:
        """Forget an unfinished frame, and give its buffer back."""
        if self._lease is not None:
            self._lease.release()
        self._lease = self._header = self._prefix = None
        self._begin = self._end = self._filled = self._crc = 0
        self._starved = False

    def get_buffer(self, _sizehint: int = -1) -> memoryview:
        """Where the next bytes are to be written; not while ``starved``."""
        if self._lease is not None:
            return self._lease.view[self._filled :]
        have = self._end - self._begin
        if not have and self._prefix is None:
            self._begin = self._end = 0
            return self._ahead
        room = max(READ_AHEAD, PREFIX.size + (self._prefix[1] if self._prefix else 0))
        if room > self._ahead.nbytes:
            grown = memoryview(bytearray(room))
            grown[:have] = self._ahead[self._begin : self._end]
            self._ahead = grown
        elif self._begin:
            self._ahead[:have] = bytes(self._ahead[self._begin : self._end])
        self._begin, self._end = 0, have
        return self._ahead[have:]

    def received(self, nbytes: int) -> None:
        """``nbytes`` bytes were written to the start of the last buffer of ``get_buffer``."""
        if self._lease is not None:
            self._crc = zlib.crc32(self._lease.view[self._filled : self._filled + nbytes], self._crc)
            self._filled += nbytes
        else:
            self._end += nbytes

    def next_frame(self) -> Frame | None:
        """The next complete frame, or None when more bytes (or, if ``starved``, room in the pool) are needed.

        Raises:
            ProtocolError: the bytes are not a frame, or one that is over a limit.
        """
        if self._failure is not None:
            raise self._failure
        try:
            return self._advance()
        except ProtocolError as error:
            self._failure = error
            self.close()
            raise

    def buffer_updated(self, nbytes: int) -> list[Frame]:
        """``received``, then all complete frames. An error that follows complete frames is raised by the next call.

        Raises:
            ProtocolError: as ``next_frame``.
        """
        self.received(nbytes)
        return self._complete()

    def feed(self, data: Buffer = b"") -> list[Frame]:
        """Any number of bytes from anywhere; what cannot be taken while ``starved`` is kept for the next call.

        Raises:
            ProtocolError: as ``buffer_updated``.
        """
        self._backlog += data
        frames = self._complete()
        while self._backlog and not self._starved and self._failure is None:
            room = self.get_buffer()
            n = min(room.nbytes, len(self._backlog))
            room[:n] = self._backlog[:n]
            del self._backlog[:n]
            self.received(n)
            frames += self._complete(bool(frames))
        return frames

    def _complete(self, late: bool = False) -> list[Frame]:
        frames: list[Frame] = []
        try:
            while (frame := self.next_frame()) is not None:
                frames.append(frame)
        except ProtocolError:
            if not frames and not late:
                raise
        return frames

    def _advance(self) -> Frame | None:
        if self._header is None and not self._read_head():
            return None
        header, prefix = self._header, self._prefix
        if header is None or prefix is None:
            return None
        _, head_bytes, _, size, crc = prefix
        if size and self._lease is None and not self._open_payload(size):
            return None
        if self._filled < size:
            return None
        if self._crc != crc:
            raise ProtocolError(
                f"The payload of a {type(header).__name__} frame is damaged (CRC {self._crc:#010x})",
                where=self.where,
                expected=f"CRC {crc:#010x}",
            )
        lease, self._lease = self._lease, None
        self._header = self._prefix = None
        self._filled = self._crc = 0
        return Frame(
            header,
            _split(memoryview(b"") if lease is None else lease.view, header),
            PREFIX.size + head_bytes + size,
            None if lease is None else lease.release,
            time.monotonic_ns(),
        )

    def _read_head(self) -> bool:
        """Read prefix and header if their bytes are there."""
        if self._prefix is None:
            have = self._end - self._begin
            if have < PREFIX.size:
                if have:
                    self._check_start(bytes(self._ahead[self._begin : self._begin + min(have, 5)]))
                return False
            self._prefix = self._read_prefix(self._ahead[self._begin : self._begin + PREFIX.size])
        count, head_bytes, head_crc, size, _ = self._prefix
        start = self._begin + PREFIX.size
        if self._end < start + head_bytes:
            return False
        head = self._ahead[start : start + head_bytes]
        if (crc := zlib.crc32(head)) != head_crc:
            raise ProtocolError(
                f"A frame's header is damaged (CRC {crc:#010x})", where=self.where, expected=f"CRC {head_crc:#010x}"
            )
        header = decode_header(head, self.where)
        self._check_payload(header, count, size)
        self._header = header
        self._begin = start + head_bytes
        return True

    def _open_payload(self, size: int) -> bool:
        lease = self._pool.take(size)
        self._starved = lease is None
        if lease is None:
            return False
        n = min(size, self._end - self._begin)
        lease.view[:n] = self._ahead[self._begin : self._begin + n]
        self._begin += n
        self._filled, self._crc = n, zlib.crc32(lease.view[:n])
        self._lease = lease
        return True

    def _check_start(self, start: bytes) -> None:
        if start[:4] != MAGIC[: len(start)]:
            raise ProtocolError(
                f"Bytes that are not a splitlm frame came (they begin with {start[:4]!r})",
                where=self.where,
                expected=f"{MAGIC!r}",
                remedy="Check that the port belongs to splitlm",
            )
        if len(start) == 5 and start[4] != PROTOCOL:
            raise ProtocolError(
                f"A frame of protocol version {start[4]} came",
                where=self.where,
                expected=f"protocol version {PROTOCOL}",
                remedy="Install the same splitlm version on both machines",
            )

    def _read_prefix(self, data: memoryview) -> tuple[int, int, int, int, int]:
        magic, protocol, reserved, count, head_bytes, head_crc, size, crc, own_crc = PREFIX.unpack(data)
        if magic != MAGIC or protocol != PROTOCOL:
            self._check_start(bytes(data[:5]))
        if (found := zlib.crc32(data[: PREFIX.size - 4])) != own_crc:
            raise ProtocolError(
                f"A frame's prefix is damaged (CRC {found:#010x})", where=self.where, expected=f"CRC {own_crc:#010x}"
            )
        if reserved:
            raise ProtocolError(f"A frame's reserved byte is {reserved}", where=self.where, expected="0")
        check_limits(count, head_bytes, size, self.where)
        if self._greeting and (head_bytes > GREETING_HEADER or size or count):
            raise ProtocolError(
                f"A frame with {head_bytes} header bytes, {count} tensors and {size} payload bytes came "
                "before the handshake was done",
                where=self.where,
                expected=f"at most {GREETING_HEADER} header bytes and no payload",
            )
        self._pool.check_fits(size, self.where)
        return count, head_bytes, head_crc, size, crc

    def _check_payload(self, header: AnyHeader, count: int, size: int) -> None:
        specs = header.tensors
        if len(specs) == count and _plain(specs) and payload_bytes(specs) == size:
            return
        for what, came, expected in (
            ("tensors in its header", len(specs), count),
            *(("dimensions of a tensor", len(spec.shape), min(len(spec.shape), MAX_RANK)) for spec in specs),
            *(("as a side of a tensor", side, max(0, side)) for spec in specs for side in spec.shape[:MAX_RANK]),
        ):
            if came != expected:
                raise ProtocolError(
                    f"A {type(header).__name__} frame has {came} {what}", where=self.where, expected=f"{expected}"
                )
        if (described := payload_bytes(specs)) != size:
            raise ProtocolError(
                f"A {type(header).__name__} frame has {size} payload bytes",
                where=self.where,
                expected=f"the {described} bytes of its tensors",
            )


def _plain(specs: Sequence[Spec]) -> bool:
    """Whether no tensor has too many dimensions, or a negative side."""
    return all(len(spec.shape) <= MAX_RANK and min(spec.shape, default=0) >= 0 for spec in specs)


def _split(payload: memoryview, header: AnyHeader) -> list[memoryview]:
    """The views of the single tensors."""
    views, at = [], 0
    for spec in header.tensors:
        views.append(payload[at : at + spec.nbytes])
        at += spec.nbytes + padding(spec.nbytes)
    return views
