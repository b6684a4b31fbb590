"""A bounded pool of reusable receive buffers.

Buffers start at multiples of 64 bytes and come in sizes that are powers of two. The bound covers buffers in use and
buffers kept for reuse. The allocator is injected: a process with a GPU can pool pinned memory, and this room needs not
know.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from splitlm.core.errors import ProtocolError
from splitlm.wire.frame import ALIGN, MAX_PAYLOAD

SMALLEST = 4096
"""Size in bytes of the smallest buffer."""


def allocate_heap(nbytes: int) -> bytearray:
    """Ordinary memory; the operating system provides pages as they are written."""
    return bytearray(nbytes)


class Lease:
    """A buffer lent by a pool. ``view`` has the length that was asked for; do not touch it after ``release()``."""

    __slots__ = ("_block", "_pool", "view")

    def __init__(self, pool: BufferPool, block: memoryview, nbytes: int) -> None:
        self.view = block[:nbytes]
        self._block: memoryview | None = block
        self._pool = pool

    def release(self) -> None:
        """Give the buffer back, from any thread; safe to call twice."""
        self._pool._take_back(self)


class BufferPool:
    """Lends at most ``limit_bytes`` of buffers at a time.

    Args:
        limit_bytes: bound on all buffers together, in bytes; the default has room for the largest frame there is.
        allocate: returns a writable buffer of the given number of bytes.

    Attributes:
        allocations: buffers that were made so far.
        reuses: how often a buffer that was there already was lent.
    """

    def __init__(
        self,
        limit_bytes: int = MAX_PAYLOAD,
        allocate: Callable[[int], bytearray | memoryview] = allocate_heap,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: dict[int, list[memoryview]] = {}
        self._held = 0
        self._lent = 0
        self.allocations = 0
        self.reuses = 0
        self._waiting: list[Callable[[], None]] = []

    @property
    def held_bytes(self) -> int:
        """Bytes of all buffers that exist now, lent or free."""
        return self._held

    @property
    def lent_bytes(self) -> int:
        """Bytes of the buffers that are lent now."""
        return self._lent

    def check_fits(self, nbytes: int, where: str = "") -> None:
        """Refuse a size for which there can never be room.

        Raises:
            ProtocolError: the size and the bound are named.
        """
        if _size_class(nbytes) > self.limit_bytes:
            raise ProtocolError(
                f"A frame with {nbytes} payload bytes came",
                where=where,
                expected=f"no more than fits the receive buffers of {self.limit_bytes} bytes",
                remedy="Use a smaller --prefill-chunk",
            )

    def take(self, nbytes: int) -> Lease | None:
        """A buffer of ``nbytes`` bytes, or None when the bound is reached: stop reading until one is released."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            if free:
                block = free.pop()
                self.reuses += 1
            else:
                if self._lent + size > self.limit_bytes:
                    return None
                self._evict(size)
                block = _aligned(self._allocate(size + ALIGN), size)
                self._held += size
                self.allocations += 1
            self._lent += size
        return Lease(self, block, nbytes)

    def when_free(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` once after the next release, in the releasing thread. Try ``take`` again after this call."""
        with self._lock:
            if wake not in self._waiting:
                self._waiting.append(wake)

    def forget(self, wake: Callable[[], None]) -> None:
        """Undo ``when_free``."""
        with self._lock:
            if wake in self._waiting:
                self._waiting.remove(wake)

    def _evict(self, size: int) -> None:
        """Let go of free buffers of other sizes until one of ``size`` bytes fits under the bound."""
        for blocks in self._free.values():
            while blocks and self._held + size > self.limit_bytes:
                self._held -= blocks.pop().nbytes

    def _take_back(self, lease: Lease) -> None:
        with self._lock:
            block, lease._block = lease._block, None
            if block is None:
                return
            lease.view = block[:0]
            self._lent -= block.nbytes
            self._free.setdefault(block.nbytes, []).append(block)
            waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


def _size_class(nbytes: int) -> int:
    """The power of two, at least ``SMALLEST``, that holds ``nbytes``."""
    return max(SMALLEST, 1 << (nbytes - 1).bit_length()) if nbytes else SMALLEST


def _aligned(memory: bytearray | memoryview, size: int) -> memoryview:
    """The first ``size`` bytes of ``memory`` that start at a multiple of ``ALIGN``."""
    view = memoryview(memory).cast("B")
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(view)) % ALIGN
    return view[skip : skip + size]
