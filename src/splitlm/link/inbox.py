"""The receiving half of a channel: what the event loop read becomes frames, and reading pauses while none is taken.

A thread may take it over (``take_over``); from then on a ``DirectReader`` decodes, and this only hears how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from splitlm.core.errors import NetworkError, PeerLostError, PeerRefusedError, ProtocolError
from splitlm.link.direct import DirectReader, loss
from splitlm.wire.decoder import READ_AHEAD, Decoder
from splitlm.wire.frame import Frame, Refused
from splitlm.wire.handshake import refusal
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Role, Turns

MAX_QUEUED = 64
"""Frames that wait to be received before reading pauses."""


@dataclass(frozen=True)
class Owner:
    """What an inbox asks of its channel, in the event loop.

    Attributes:
        greet: takes a frame of the handshake; None where there is none.
        refuse: gives up on a peer that broke the protocol.
        hang_up: answers a peer that ended the link.
    """

    greet: Callable[[Frame], None] | None
    refuse: Callable[[NetworkError], None]
    hang_up: Callable[[], None]


class Inbox:
    """Reads from one asyncio transport, once it is attached.

    Args:
        role: the peer's.
        turns: of the channel.
        peer: what to call it, until ``admit``.
        pool: receive buffers.
        owner: whom to tell what came of it.

    Attributes:
        error: why nothing more comes, or goes; None while the stream is up.
    """

    def __init__(self, role: Role, turns: Turns, peer: str, pool: BufferPool, owner: Owner) -> None:
        self.error: NetworkError | None = None
        self.queue: deque[Frame] = deque()
        self.decoder = Decoder(pool, peer, greeting=owner.greet is not None)
        self._role, self._turns, self._peer, self._pool = role, turns, peer, pool
        self._greet, self._refuse, self._hang_up = owner.greet, owner.refuse, owner.hang_up
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._reader: asyncio.Future[None] | None = None
        self._direct: DirectReader | None = None
        self._paused = self._deaf = False
        self._in = 0

    @property
    def bytes_in(self) -> int:
        """Bytes received so far."""
        return self._in + (self._direct.bytes_in if self._direct else 0)

    def attach(self, transport: asyncio.Transport) -> None:
        """Pause and resume this transport from now on."""
        self._transport = transport

    def admit(self, peer: str) -> None:
        """The handshake is done: what comes now is for whoever receives."""
        self._greet, self._peer, self.decoder.where = None, peer, peer
        self.decoder.admit()

    # What the user of the channel calls.

    async def receive(self) -> Frame:
        """The next frame; see ``StreamChannel.receive``."""
        if self._reader is not None or self._direct is not None:
            raise RuntimeError("another task or thread is already waiting for a frame of this channel")
        if not self.queue:
            self._resume()
        while not self.queue:
            if self.error is not None:
                raise self.error
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame = self.queue.popleft()
        if len(self.queue) <= MAX_QUEUED // 2:
            self._resume()
        return frame

    def take_over(self) -> DirectReader | None:
        """Let one thread read the socket itself, for good; None where that is not possible: then ``receive``."""
        transport = self._transport
        if transport is None or self.error is not None or self._greet or self._reader or self._direct:
            return None
        plain = transport.get_extra_info("socket")
        if plain is None or transport.get_extra_info("sslcontext") is not None or transport.is_closing():
            return None
        if not hasattr(select, "poll"):  # what its thread would wait with
            return None
        try:
            sock = socket.socket(fileno=os.dup(plain.fileno()))
        except OSError:  # no descriptor is left
            return None
        sock.setblocking(False)
        self._set_reading(False)
        self._pool.forget(self._wake)
        self._direct = DirectReader(sock, self.decoder, self._pool, self._peer, self.queue, self._admit, self._ended)
        self.queue.clear()
        return self._direct

    # What the event loop calls.

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return memoryview(bytearray(READ_AHEAD)) if self._deaf else self.decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        self._in += nbytes
        if not self._deaf:
            self.decoder.received(nbytes)
            self._pump()

    # What the channel calls.

    def note_loss(self, how: str) -> None:
        """Remember that the peer is gone; a reader learns it after the frames that came before."""
        if self.error is None:
            self.error = loss(how, self.decoder, self._peer)
        self._wake_reader()

    def stop(self, error: NetworkError) -> None:
        """Take no further bytes; ``error`` is what a reader gets after the frames that came before."""
        if self.error is None:
            self.error = error
        self._deaf = True
        if self._direct is not None:
            self._direct.close(error)
        else:
            self.decoder.close()
        self._set_reading(True)
        self._wake_reader()

    def discard(self) -> None:
        """Nobody will receive what came."""
        while self.queue:
            self.queue.popleft().release()

    def detach(self, how: str) -> None:
        """The connection is gone: decode what is here, however much, then nothing more."""
        self._pump(bounded=False)
        self.note_loss(how)
        if self._direct is not None:
            self._direct.close(self.error or PeerLostError("The peer went away", where=self._peer))
        elif not self.decoder.starved:
            self.decoder.close()
        self._pool.forget(self._wake)

    # Inward.

    def _pump(self, *, bounded: bool = True) -> None:
        """Decode what came, as far as there is room; then pause or go on reading."""
        if self._direct is not None and not self._deaf:
            return
        waiting = False
        try:
            while not self._deaf and not (bounded and len(self.queue) >= MAX_QUEUED):
                frame = self.decoder.next_frame()
                if frame is not None:
                    self._dispatch(frame)
                elif self.decoder.starved and not waiting:
                    # Ask to be woken first, then look once more: a release in between must not be missed.
                    self._pool.when_free(self._wake)
                    waiting = True
                else:
                    break
        except ProtocolError as error:
            self._refuse(error)
        self._set_reading(self._deaf or not (self.decoder.starved or len(self.queue) >= MAX_QUEUED))

    def _dispatch(self, frame: Frame) -> None:
        if self._greet is not None:
            self._greet(frame)
            return
        try:
            self._admit(frame)
        except PeerRefusedError as error:
            self.stop(error)
            self._hang_up()
            return
        self.queue.append(frame)
        self._wake_reader()

    def _admit(self, frame: Frame) -> None:
        """Take a frame's turn into account, in the thread that reads."""
        try:
            self._turns.step(self._role, frame.header, self._peer)
        except ProtocolError:
            frame.release()
            raise
        if isinstance(frame.header, Refused):
            raise refusal(frame.header, self._peer)

    def _ended(self, error: NetworkError) -> None:
        """The thread that reads came to an end of the stream: what follows from that is the loop's."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: NetworkError) -> None:
        if isinstance(error, ProtocolError):
            self._refuse(error)
        else:
            self.stop(error)
            self._hang_up()

    def _wake(self) -> None:
        """A buffer was released, in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to wake
            self._loop.call_soon_threadsafe(self._resume)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _resume(self) -> None:
        if self._paused or self.decoder.starved:
            self._pump()

    def _set_reading(self, on: bool) -> None:
        if self._transport is None or self._transport.is_closing() or on != self._paused:
            return
        self._paused = not on
        (self._transport.resume_reading if on else self._transport.pause_reading)()
