"""One channel over any asyncio transport: its handshake, its two halves, and its end. TCP and memory both use it.

There is no task in here. The event loop calls the protocol, the protocol sets the future of whoever waits, and what
must happen later is a timer that ``connection_lost`` cancels.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError
from splitlm.link.direct import DirectReader
from splitlm.link.inbox import Inbox, Owner
from splitlm.link.outbox import JOIN_BYTES, Outbox
from splitlm.wire.frame import Buffer, Frame, Header, Refused, encode
from splitlm.wire.handshake import Claims, Handshake
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import OPEN, Purpose, Role, Turns

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
        self.peer = _name(claims, where)
        self._loop, self._role, self._where = loop, role, where
        self._handshake, self._claims = handshake, claims
        self._turns = handshake.turns if handshake else Turns(purpose, OPEN[purpose])
        self._on_settled = on_settled
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._outbox = Outbox()
        self._inbox = Inbox(
            "listener" if role == "dialler" else "dialler",
            self._turns,
            self.peer,
            pool,
            Owner(partial(self._greet, handshake) if handshake else None, self.refuse, self._hang_up),
        )
        # The loop calls the inbox itself: two calls less for every read.
        self.get_buffer = self._inbox.get_buffer  # type: ignore[method-assign]
        self.buffer_updated = self._inbox.buffer_updated  # type: ignore[method-assign]

    @property
    def error(self) -> NetworkError | None:
        """Why nothing more comes or goes; None while the stream is up."""
        return self._inbox.error

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
        return self._inbox.bytes_in

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
        return bool(self._inbox.queue)

    # What the user of the channel calls.

    async def send(self, header: Header, tensors: Sequence[Buffer] = ()) -> None:
        """Send one frame; when it returns the tensors may be overwritten. Several tasks may send at once.

        Raises:
            PeerLostError: the peer is gone.
            ProtocolError: the frame is over a limit, or out of turn.
        """
        parts = encode(header, tensors)
        await self._outbox.drained()
        if self._inbox.error is not None:
            raise self._inbox.error
        self._turns.step(self._role, header, self.peer)
        self._outbox.write(parts)
        await self._outbox.drained()
        if self._inbox.error is not None:
            raise self._inbox.error

    def send_now(self, header: Header, tensors: Sequence[Buffer] = ()) -> bool:
        """Send one frame at once, from any thread; False where it has to wait: then ``send`` it.

        For a channel that one thread at a time sends on. Large frames are left to ``send``, which waits.

        Raises:
            ProtocolError: the frame is over a limit, or out of turn.
        """
        parts = encode(header, tensors)
        if self._inbox.error is not None or sum(map(len, parts)) > JOIN_BYTES:
            return False
        self._turns.check(self._role, header, self.peer)
        if not self._outbox.write_now(parts):
            return False
        self._turns.step(self._role, header, self.peer)
        return True

    def send_together(self, frames: Sequence[tuple[Header, Sequence[Buffer]]]) -> list[int]:
        """``send_now`` for several frames in one write, so that the peer finds them together.

        Returns:
            Bytes of each; nothing where they have to wait.

        Raises:
            ProtocolError: as ``send_now``; nothing was sent.
        """
        encoded = [encode(header, tensors) for header, tensors in frames]
        sizes = [sum(map(len, parts)) for parts in encoded]
        if self._inbox.error is not None or sum(sizes) > JOIN_BYTES:
            return []
        for header, _ in frames:
            self._turns.check(self._role, header, self.peer)
        if not self._outbox.write_now([part for parts in encoded for part in parts]):
            return []
        for header, _ in frames:
            self._turns.step(self._role, header, self.peer)
        return sizes

    def receive(self) -> Coroutine[Any, Any, Frame]:
        """The next frame; one task at a time may wait.

        Raises:
            PeerLostError: the peer is gone and no frame is left.
            PeerRefusedError: the peer ended the link, and said why.
            ProtocolError: the peer sent bytes that are not a frame, or a frame out of turn.
        """
        return self._inbox.receive()

    def take_over(self) -> DirectReader | None:
        """Let one thread read the socket itself, for good; None where that is not possible: then ``receive``."""
        return self._inbox.take_over()

    async def close(self) -> None:
        """Flush what was accepted for sending, tell the peer, and end the stream; safe to call twice.

        Takes at most ``FLUSH_S + LINGER_S`` when the peer does not react.
        """
        if self._transport is None:
            return
        self._inbox.stop(PeerLostError("The link was closed by this side", where=self.peer))
        self._inbox.discard()
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
        self._inbox.attach(transport)
        self._outbox.attach(transport)
        if self._handshake is None:
            self._settle()
        elif (hello := self._handshake.start()) is not None:
            self._outbox.write(encode(hello))

    def eof_received(self) -> None:
        """The peer sends no more. The transport then closes, once what we have to say is with the kernel."""
        self._inbox.note_loss("went away")
        self._hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._inbox.detach(f"was lost ({exc})" if exc else "went away")
        if self._timer is not None:
            self._timer.cancel()
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
        self._inbox.stop(error)
        self._hang_up()
        self._settle()

    def _greet(self, handshake: Handshake, frame: Frame) -> None:
        reply = handshake.receive(frame.header)
        if reply is not None:
            self._outbox.write(encode(reply))
        if handshake.error is not None:
            self._inbox.stop(handshake.error)
            self._hang_up()
            self._settle()
        elif handshake.done:
            self._claims = handshake.claims
            self.peer = _name(self._claims, self._where)
            self._inbox.admit(self.peer)
            self._settle()

    def _settle(self) -> None:
        """The handshake is over, one way or the other."""
        if not self.settled.done():
            self.settled.set_result(None)
            if self._on_settled is not None:
                self._on_settled(self)

    def _hang_up(self) -> None:
        """Say goodbye, and leave the peer some time to say it too: a reset could overtake what we sent last."""
        if self._transport is None or self._timer is not None or self.lost.done():
            return
        self._outbox.finish()
        self._timer = self._loop.call_later(LINGER_S, self._transport.abort)


def _name(claims: Claims | None, where: str) -> str:
    return f"{claims.node} at {where}" if claims and claims.node else where
