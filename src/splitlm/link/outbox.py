"""The sending half of a channel: frames go to the transport, and senders wait while the kernel takes no more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from splitlm.wire.frame import Buffer

JOIN_BYTES = 64 * 1024
"""Frames up to this size are copied into one write; larger ones are written part by part without a copy of ours."""


class Outbox:
    """Writes to one asyncio transport, once it is attached."""

    def __init__(self) -> None:
        self.bytes_out = 0
        self._transport: asyncio.Transport | None = None
        self._full = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._loop = asyncio.get_running_loop()

    def attach(self, transport: asyncio.Transport) -> None:
        """Write to this transport from now on."""
        self._transport = transport
        # A send returns when the kernel has the bytes: some event loops keep a view of the caller's tensor until then.
        transport.set_write_buffer_limits(high=0)

    def write(self, parts: Sequence[Buffer]) -> None:
        """Hand the parts of one frame to the transport, together."""
        if self._transport is None or self._transport.is_closing():
            return
        size = sum(map(len, parts))
        self.bytes_out += size
        if size <= JOIN_BYTES:
            self._transport.write(b"".join(parts))
        else:
            for part in parts:
                self._transport.write(part)

    async def drained(self) -> None:
        """Wait until the kernel has everything that was written, or the connection is gone."""
        while self._full:
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
        """The kernel has everything, or will never take it."""
        self._full = False
        for turn in self._waiting:
            if not turn.done():
                turn.set_result(None)

    def finish(self) -> None:
        """Say that nothing follows, after what was written."""
        transport = self._transport
        if transport is not None and transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
