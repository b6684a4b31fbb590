"""The sending half of a channel: frames go to the transport, and senders wait while the kernel takes no more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence

from splitlm.wire.frame import Buffer

JOIN_BYTES = 64 * 1024
"""Frames up to this size are copied into one write; larger ones are written piece by piece without a copy of ours."""
PIECE_BYTES = 512 * 1024
"""What the transport is given at once of a large frame: it copies whatever the kernel does not take at once."""
PIECES = 4
"""That it is given before others have their turn."""


class Outbox:
    """Writes to one asyncio transport, once it is attached."""

    def __init__(self) -> None:
        self.bytes_out = 0
        self._transport: asyncio.Transport | None = None
        self._full = self._feeding = False
        self._pieces: deque[memoryview] = deque()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()
        self._direct: socket.socket | None = None
        self._lock = threading.Lock()

    def attach(self, transport: asyncio.Transport) -> None:
        """Write to this transport from now on."""
        self._transport = transport
        # A send returns when the kernel has the bytes: some event loops keep a view of the caller's tensor until then.
        transport.set_write_buffer_limits(high=0)
        plain = transport.get_extra_info("socket")
        if plain is not None and transport.get_extra_info("sslcontext") is None:
            with contextlib.suppress(OSError):  # no descriptor is left: the loop sends, as on links that are no socket
                self._direct = socket.socket(fileno=os.dup(plain.fileno()))
                self._direct.setblocking(False)

    def write(self, parts: Sequence[Buffer]) -> None:
        """Hand the parts of one frame to the transport, together."""
        if self._transport is None or self._transport.is_closing():
            return
        size = sum(map(len, parts))
        self.bytes_out += size
        if size <= JOIN_BYTES and not self._pieces:
            self._transport.write(b"".join(parts))
            return
        for part in parts:
            view = memoryview(part).cast("B")
            self._pieces.extend(view[at : at + PIECE_BYTES] for at in range(0, view.nbytes, PIECE_BYTES))
        if not self._full and not self._feeding:
            self._feed()

    def _feed(self) -> None:
        """Give the transport pieces while the kernel takes them, a few at a time: the loop has others to serve."""
        self._feeding = False
        for _ in range(min(PIECES, len(self._pieces))):
            if self._full or self._transport is None:
                return  # ``resume`` goes on
            self._transport.write(self._pieces.popleft())
        if self._full:
            return
        if self._pieces:
            self._feeding = True
            self._loop.call_soon(self._feed)
        else:
            self._wake()

    def _wake(self) -> None:
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    def write_now(self, parts: Sequence[Buffer]) -> bool:
        """Give one frame to the kernel at once, from any thread; whether that was possible.

        A frame that the loop writes costs the way to its thread first, much of a hop. False leaves it to the loop:
        the transport is no plain socket, earlier bytes wait, or the kernel has no room.
        """
        with self._lock:
            direct, transport = self._direct, self._transport
            if direct is None or transport is None or self._full or self._pieces or transport.is_closing():
                return False
            if transport.get_write_buffer_size():
                return False
            data = b"".join(parts)
            try:
                sent = direct.send(data)
            except OSError:  # no room, or the link is down: the loop finds out which
                return False
            self.bytes_out += sent
            if sent < len(data):
                self._full = True  # until the loop has written the rest
                self._loop.call_soon_threadsafe(self._write_rest, data[sent:])
            return True

    def _write_rest(self, rest: bytes) -> None:
        self._full = False
        self.write([rest])
        if not self._full:
            self.resume()

    def detach(self) -> None:
        """The connection is gone."""
        with self._lock:
            direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        self._pieces.clear()
        self.resume()

    async def drained(self) -> None:
        """Wait until the kernel has everything that was written, or the connection is gone."""
        while self._full or self._pieces:
            turn = self._loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                self._waiting.remove(turn)

    def pause(self) -> None:
        """The kernel takes no more."""
        self._full = True

    def resume(self) -> None:
        """The kernel has all it was given, or will never take it."""
        self._full = False
        if not self._feeding:
            self._feed()

    def finish(self) -> None:
        """Say that nothing follows, after what was written."""
        transport = self._transport
        if transport is not None and transport.can_write_eof() and not transport.is_closing():
            while self._pieces:
                transport.write(self._pieces.popleft())
            with contextlib.suppress(OSError):  # the peer has reset the connection: the loop is about to hear of it
                transport.write_eof()
