"""The reading half of a transport that no kernel stands behind: what came is given to the channel as a loop would."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque


class ReadingHalf(asyncio.Transport):
    """One end of a pipe, as its reader sees it. The other half, and how the pipe ends, are the subclass's.

    A read fills the protocol's buffer as far as bytes are there; the loop gets its turn between two reads.
    """

    def __init__(self, protocol: asyncio.BufferedProtocol, extra: dict[str, object] | None = None) -> None:
        super().__init__(extra)
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._inbound = deque[memoryview]()
        self._held = self._took = 0  # bytes of ``_inbound``, and pieces of it that were wholly read
        self._inbound_ended = self._closing = False
        self._scheduled = self._paused = False

    def is_closing(self) -> bool:
        """Whether the end is near."""
        return self._closing

    def pause_reading(self) -> None:
        """Deliver nothing until ``resume_reading``."""
        self._paused = True

    def resume_reading(self) -> None:
        """Deliver again."""
        self._paused = False
        self._schedule()

    @abstractmethod
    def _read_on(self) -> None:
        """A read has lessened ``_held``, and may have added to ``_took``: there is room for the other side's."""

    def _hold(self, piece: memoryview) -> None:
        """What came, to be read in its turn."""
        if piece:
            self._inbound.append(piece)
            self._held += piece.nbytes

    def _spill(self) -> None:
        """What came is read by nobody."""
        self._inbound.clear()
        self._held = 0

    def _schedule(self) -> None:
        if not self._scheduled and not self._paused and not self._closing:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        """One read, as an event loop makes it."""
        self._scheduled = False
        if self._closing or self._paused:
            return
        if self._inbound:
            self._read()
        elif self._inbound_ended:
            self._protocol.eof_received()
            self.close()
            return
        if self._inbound or self._inbound_ended:
            self._schedule()

    def _read(self) -> None:
        room, size = memoryview(self._protocol.get_buffer(-1)), 0
        while self._inbound and size < room.nbytes:
            piece = self._inbound[0]
            part = min(room.nbytes - size, piece.nbytes)
            room[size : size + part] = piece[:part]
            size += part
            if part == piece.nbytes:
                self._inbound.popleft()
                self._took += 1
            else:
                self._inbound[0] = piece[part:]
        self._held -= size
        self._read_on()
        self._protocol.buffer_updated(size)
