"""One channel over any asyncio transport: handshake, decoding, turns and back-pressure. TCP and memory both use it.

There is no task in here. The event loop calls the protocol, the protocol sets the future of whoever waits, and what
must happen later is a timer that ``connection_lost`` cancels.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from splitlm.core.errors import NetworkError, PeerLostError, PeerRefusedError, ProtocolError
from splitlm.link.direct import DirectReader, loss
from splitlm.link.outbox import JOIN_BYTES, Outbox
from splitlm.wire.decoder import READ_AHEAD, Decoder
from splitlm.wire.frame import Buffer, Frame, Header, Refused, encode
from splitlm.wire.handshake import Claims, Handshake, refusal
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import OPEN, Purpose, Role, Turns

MAX_QUEUED = 64
"""Frames that wait to be received before reading pauses."""
FLUSH_S = 3.0
"""How long ``close`` waits until the bytes of earlier sends are with the kernel."""
LINGER_S = 1.0
"""How long the last words may take to reach a peer before the connection is cut."""


class StreamChannel(asyncio.BufferedProtocol):
    """A ``Channel`` (wire/channel.py) over one asyncio transport.

    Args:
        role: which side of the connection this is.
        purpose: ``data`` or ``control``.
        where: what to call the peer until its claims are known.
        pool: receive buffers; may be shared by several channels.
        handshake: to be completed before frames pass; None for a peer whose ``claims`` are known already.
        claims: the peer's, when there is no handshake.
        on_settled: called once, when the handshake has succeeded or failed.
    """

    def __init__(
        self,
        role: Role,
        purpose: Purpose,
        where: str,
        pool: BufferPool,
        *,
        handshake: Handshake | None = None,
        claims: Claims | None = None,
        on_settled: Callable[[StreamChannel], None] | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.settled: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[None] = loop.create_future()
        self.error: NetworkError | None = None
        self._loop, self._pool, self._role = loop, pool, role
        self._peer_role: Role = "listener" if role == "dialler" else "dialler"
        self._where = where
        self._decoder = Decoder(pool, where, greeting=handshake is not None)
        self._handshake = handshake
        self._claims = claims
        self._turns = handshake.turns if handshake else Turns(purpose, OPEN[purpose])
        self._on_settled = on_settled
        self._transport: asyncio.Transport | None = None
        self._outbox = Outbox()
        self._queue: deque[Frame] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._paused = self._deaf = False
        self._timer: asyncio.TimerHandle | None = None
        self._in = 0
        self._direct: DirectReader | None = None

    @property
    def peer(self) -> str:
        """The peer's name and address."""
        return f"{self._claims.node} at {self._where}" if self._claims and self._claims.node else self._where

    @property
    def claims(self) -> Claims:
        """What the peer said of itself.

        Raises:
            ProtocolError: the handshake is not done.
        """
        if self._claims is None:
            raise ProtocolError("The handshake is not done", where=self._where)
        return self._claims

    @property
    def host(self) -> str:
        """The peer's host as seen from here; ``memory`` when there is no network between."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return str(name[0]) if name else "memory"

    @property
    def local_host(self) -> str:
        """This side's address on the connection; ``memory`` when there is no network between."""
        name = self._transport.get_extra_info("sockname") if self._transport else None
        return str(name[0]) if name else "memory"

    @property
    def bytes_in(self) -> int:
        """Bytes received so far."""
        return self._in + (self._direct.bytes_in if self._direct else 0)

    @property
    def bytes_out(self) -> int:
        """Bytes sent so far."""
        return self._outbox.bytes_out

    @property
    def admitted(self) -> bool:
        """Whether the handshake has succeeded."""
        return self._claims is not None

    @property
    def pending(self) -> bool:
        """Whether a frame is waiting to be received."""
        return bool(self._queue)

    # What the user of the channel calls.

    async def send(self, header: Header, tensors: Sequence[Buffer] = ()) -> None:
        """Send one frame; when it returns the tensors may be overwritten. Several tasks may send at once.

        Raises:
            PeerLostError: the peer is gone.
            ProtocolError: the frame is over a limit, or out of turn.
        """
        parts = encode(header, tensors)
        await self._outbox.drained()
        if self.error is not None:
            raise self.error
        self._turns.step(self._role, header, self.peer)
        self._outbox.write(parts)
        await self._outbox.drained()
        if self.error is not None:
            raise self.error

    def send_now(self, header: Header, tensors: Sequence[Buffer] = ()) -> bool:
        """Send one frame at once, from any thread; False where it has to wait: then ``send`` it.

        For a channel that one thread at a time sends on. Large frames are left to ``send``, which waits.

        Raises:
            ProtocolError: the frame is over a limit, or out of turn.
        """
        parts = encode(header, tensors)
        if self.error is not None or sum(map(len, parts)) > JOIN_BYTES:
            return False
        self._turns.check(self._role, header, self.peer)
        if not self._outbox.write_now(parts):
            return False
        self._turns.step(self._role, header, self.peer)
        return True

    async def receive(self) -> Frame:
        """The next frame; one task at a time may wait.

        Raises:
            PeerLostError: the peer is gone and no frame is left.
            PeerRefusedError: the peer ended the link, and said why.
            ProtocolError: the peer sent bytes that are not a frame, or a frame out of turn.
        """
        if self._reader is not None or self._direct is not None:
            raise RuntimeError("another task or thread is already waiting for a frame of this channel")
        if not self._queue:
            self._resume()
        while not self._queue:
            if self.error is not None:
                raise self.error
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        frame = self._queue.popleft()
        if len(self._queue) <= MAX_QUEUED // 2:
            self._resume()
        return frame

    def take_over(self) -> DirectReader | None:
        """Let one thread read the socket itself, for good; None where that is not possible: then ``receive``."""
        transport = self._transport
        if transport is None or self.error is not None or not self.admitted or self._reader or self._direct:
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
        self._direct = DirectReader(
            sock, self._decoder, self._pool, self.peer, self._queue, self._admit, self._read_ended
        )
        self._queue.clear()
        return self._direct

    async def close(self) -> None:
        """Flush what was accepted for sending, tell the peer, and end the stream; safe to call twice.

        Takes at most ``FLUSH_S + LINGER_S`` when the peer does not react.
        """
        if self._transport is None:
            return
        self._stop_listening(PeerLostError("The link was closed by this side", where=self.peer))
        while self._queue:
            self._queue.popleft().release()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._outbox.drained()
            self._hang_up()
            await asyncio.wait({self.lost})
        finally:
            self._transport.abort()

    def cut(self) -> None:
        """End the stream at once, with no last words; ``close`` then returns soon."""
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A transport is ready."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        self._transport = transport
        self._outbox.attach(transport)
        if self._handshake is None:
            self._settle()
        elif (hello := self._handshake.start()) is not None:
            self._outbox.write(encode(hello))

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes go."""
        return memoryview(bytearray(READ_AHEAD)) if self._deaf else self._decoder.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes came."""
        self._in += nbytes
        if not self._deaf:
            self._decoder.received(nbytes)
            self._pump()

    def eof_received(self) -> None:
        """The peer sends no more. The transport then closes, once what we have to say is with the kernel."""
        self._note_loss("went away")
        self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._pump(bounded=False)
        self._note_loss(f"was lost ({exc})" if exc else "went away")
        if self._timer is not None:
            self._timer.cancel()
        if self._direct is not None:
            self._direct.close(self.error or PeerLostError("The peer went away", where=self.peer))
        elif not self._decoder.starved:
            self._decoder.close()
        self._pool.forget(self._wake)
        self._outbox.detach()
        self.lost.set_result(None)
        self._settle()

    def pause_writing(self) -> None:
        """The kernel takes no more."""
        self._outbox.pause()

    def resume_writing(self) -> None:
        """The kernel took everything."""
        self._outbox.resume()

    # Inward.

    def refuse(self, error: NetworkError) -> None:
        """Give up on the peer: tell it why, and cut the connection soon."""
        if self._transport is None or self.lost.done():
            return
        if "Refused" in self._turns.allowed(self._role):
            header = Refused(". ".join(filter(None, (error.what, error.expected and f"Expected {error.expected}"))))
            self._turns.step(self._role, header)
            self._outbox.write(encode(header))
        self._stop_listening(error)
        self._hang_up()
        self._settle()

    def _pump(self, *, bounded: bool = True) -> None:
        """Decode what came, as far as there is room; then pause or go on reading."""
        if self._direct is not None and not self._deaf:
            return
        waiting = False
        try:
            while not self._deaf and not (bounded and len(self._queue) >= MAX_QUEUED):
                frame = self._decoder.next_frame()
                if frame is not None:
                    self._dispatch(frame)
                elif self._decoder.starved and not waiting:
                    # Ask to be woken first, then look once more: a release in between must not be missed.
                    self._pool.when_free(self._wake)
                    waiting = True
                else:
                    break
        except ProtocolError as error:
            self.refuse(error)
        self._set_reading(self._deaf or not (self._decoder.starved or len(self._queue) >= MAX_QUEUED))

    def _dispatch(self, frame: Frame) -> None:
        if self._handshake is not None and self._claims is None:
            self._greet(self._handshake, frame)
            return
        try:
            self._admit(frame)
        except PeerRefusedError as error:
            self._stop_listening(error)
            self._hang_up()
            return
        self._queue.append(frame)
        self._wake_reader()

    def _admit(self, frame: Frame) -> None:
        """Take a frame's turn into account, in the thread that reads."""
        try:
            self._turns.step(self._peer_role, frame.header, self.peer)
        except ProtocolError:
            frame.release()
            raise
        if isinstance(frame.header, Refused):
            raise refusal(frame.header, self.peer)

    def _read_ended(self, error: NetworkError) -> None:
        """The thread that reads came to an end of the stream: what follows from that is the loop's."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            self._loop.call_soon_threadsafe(self._end_reading, error)

    def _end_reading(self, error: NetworkError) -> None:
        if isinstance(error, ProtocolError):
            self.refuse(error)
        else:
            self._stop_listening(error)
            self._hang_up()

    def _greet(self, handshake: Handshake, frame: Frame) -> None:
        reply = handshake.receive(frame.header)
        if reply is not None:
            self._outbox.write(encode(reply))
        if handshake.error is not None:
            self._stop_listening(handshake.error)
            self._hang_up()
            self._settle()
        elif handshake.done:
            self._claims = handshake.claims
            self._decoder.where = self.peer
            self._decoder.admit()
            self._settle()

    def _settle(self) -> None:
        """The handshake is over, one way or the other."""
        if not self.settled.done():
            self.settled.set_result(None)
            if self._on_settled is not None:
                self._on_settled(self)

    def _wake(self) -> None:
        """A buffer was released, in any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to wake
            self._loop.call_soon_threadsafe(self._resume)

    def _wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _resume(self) -> None:
        if self._paused or self._decoder.starved:
            self._pump()

    def _set_reading(self, on: bool) -> None:
        if self._transport is None or self._transport.is_closing() or on != self._paused:
            return
        self._paused = not on
        (self._transport.resume_reading if on else self._transport.pause_reading)()

    def _note_loss(self, how: str) -> None:
        """Remember that the peer is gone; a reader learns it after the frames that came before."""
        if self.error is None:
            self.error = loss(how, self._decoder, self.peer)
        self._wake_reader()

    def _stop_listening(self, error: NetworkError) -> None:
        """Take no further bytes; ``error`` is what a reader gets after the frames that came before."""
        if self.error is None:
            self.error = error
        self._deaf = True
        if self._direct is not None:
            self._direct.close(error)
        else:
            self._decoder.close()
        self._set_reading(True)
        self._wake_reader()

    def _hang_up(self) -> None:
        """Say goodbye, and leave the peer some time to say it too: a reset could overtake what we sent last."""
        if self._transport is None or self._timer is not None or self.lost.done():
            return
        self._outbox.finish()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)
