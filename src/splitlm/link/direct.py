"""The receiving half of a channel, once a thread other than the event loop's reads the socket itself.

The event loop still owns the connection: it learns from here how the stream ended, refuses, and closes.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable

from splitlm.core.errors import NetworkError, PeerLostError
from splitlm.wire.decoder import Decoder
from splitlm.wire.frame import Frame
from splitlm.wire.pool import BufferPool


def loss(how: str, decoder: Decoder, peer: str) -> PeerLostError:
    """The error for a peer that is gone; says so where that happened in the middle of a frame."""
    part = decoder.partial_bytes
    middle = f" in the middle of a frame, after {part} bytes of it" if part else ""
    return PeerLostError(f"The peer {how}{middle}", where=peer)


class DirectReader:
    """Reads frames from one plain socket without waiting. Made by a channel's ``take_over``.

    Args:
        sock: a duplicate of the connection's socket, non-blocking; closed with the reader.
        decoder: with all bytes that came before.
        pool: the decoder's.
        frames: that were decoded already.
        admit: takes a frame's turn into account.
        ended: told, in the reading thread, why nothing more comes.
    """

    def __init__(
        self,
        sock: socket.socket,
        decoder: Decoder,
        pool: BufferPool,
        peer: str,
        frames: Iterable[Frame],
        admit: Callable[[Frame], None],
        ended: Callable[[NetworkError], None],
    ) -> None:
        self.bytes_in = 0
        self._sock, self._decoder, self._pool, self._peer = sock, decoder, pool, peer
        self._frames = deque(frames)
        self._admit, self._ended = admit, ended
        self._error: NetworkError | None = None
        self._lock = threading.Lock()
        self._wake: Callable[[], None] | None = None

    def fileno(self) -> int:
        """The socket to wait for; -1 while waiting for it is no use: there is no buffer, or the reader was closed."""
        return -1 if self._decoder.starved else self._sock.fileno()

    def attach(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when ``read`` is worth a call though the socket did not say so."""
        self._wake = wake

    def read(self) -> Frame | None:
        """The next frame that is here, or None. One thread at a time may read.

        Raises:
            PeerLostError: the peer is gone and no frame is left, or this side closed the link.
            PeerRefusedError: the peer ended the link, and said why.
            ProtocolError: the peer sent bytes that are not a frame, or a frame out of turn. The peer is told.
        """
        with self._lock:
            if self._frames:
                return self._frames.popleft()
            if self._error is not None:
                raise self._error
            try:
                return self._read()
            except NetworkError as error:
                self._error = error
        self._ended(self._error)
        raise self._error

    def close(self, error: NetworkError) -> None:
        """Read nothing more, from any thread: the next ``read`` raises ``error`` or what was raised before."""
        with self._lock:
            if self._error is None:
                self._error = error
            while self._frames:
                self._frames.popleft().release()
            self._decoder.close()
            self._sock.close()
        self._pool.forget(self._look_again)
        self._look_again()

    def _read(self) -> Frame | None:
        decoder, waiting = self._decoder, False
        while True:
            frame = decoder.next_frame()
            if frame is not None:
                self._admit(frame)
                return frame
            if decoder.starved:
                if waiting:
                    return None
                # Ask to be woken first, then look once more: a release in between must not be missed.
                self._pool.when_free(self._look_again)
                waiting = True
                continue
            try:
                count = self._sock.recv_into(decoder.get_buffer())
            except (BlockingIOError, InterruptedError):
                return None
            except OSError as error:
                raise loss(f"was lost ({error})", decoder, self._peer) from None
            if not count:
                raise loss("went away", decoder, self._peer)
            self.bytes_in += count
            decoder.received(count)

    def _look_again(self) -> None:
        if self._wake is not None:
            self._wake()
