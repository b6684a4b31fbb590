"""What a way for frames looks like to those who use it: the contract that links implement and the bus is built on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from splitlm.wire.frame import Buffer, Frame, Header
from splitlm.wire.handshake import Claims


class DirectReader(Protocol):
    """The receiving half of a channel, read by one thread without the event loop."""

    def fileno(self) -> int:
        """The socket to wait for; -1 while waiting for it is no use."""
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """``wake`` is called, from any thread, when ``read`` is worth a call though the socket did not say so."""
        ...

    def read(self) -> Frame | None:
        """The next frame that is here, or None.

        Raises:
            PeerLostError: the peer is gone and no frame is left.
            ProtocolError: the peer sent bytes that are not a frame, or a frame out of turn.
        """
        ...


class Channel(Protocol):
    """One ordered, authenticated, two-way stream of frames between this process and a peer."""

    @property
    def peer(self) -> str:
        """The peer's name and address, for messages."""
        ...

    @property
    def host(self) -> str:
        """The peer's host as seen from here."""
        ...

    @property
    def claims(self) -> Claims:
        """What the peer said of itself in the handshake."""
        ...

    @property
    def bytes_in(self) -> int:
        """Bytes received so far."""
        ...

    @property
    def bytes_out(self) -> int:
        """Bytes sent so far."""
        ...

    @property
    def pending(self) -> bool:
        """Whether ``receive`` has a frame to give at once."""
        ...

    async def send(self, header: Header, tensors: Sequence[Buffer] = ()) -> None:
        """Send one frame; returns once the bytes are with the kernel or in a bounded buffer.

        Raises:
            PeerLostError: the peer is gone.
        """
        ...

    def send_now(self, header: Header, tensors: Sequence[Buffer] = ()) -> bool:
        """Send one frame at once, from any thread; False where it has to wait: then ``send`` it.

        For a channel that one thread at a time sends on.

        Raises:
            ProtocolError: the frame is over a limit, or out of turn.
        """
        ...

    def send_together(self, frames: Sequence[tuple[Header, Sequence[Buffer]]]) -> list[int]:
        """``send_now`` for several frames in one write, so that the peer finds them together.

        Returns:
            Bytes of each; nothing where they have to wait.

        Raises:
            ProtocolError: as ``send_now``; nothing was sent.
        """
        ...

    async def receive(self) -> Frame:
        """The next frame; call its ``release`` when its buffers are no longer read.

        Raises:
            PeerLostError: the peer is gone and no frame is left.
            ProtocolError: the peer sent bytes that are not a frame, or a frame out of turn.
        """
        ...

    def take_over(self) -> DirectReader | None:
        """Let one thread read the frames itself, for good; None where that is not possible: then ``receive``."""
        ...

    async def close(self) -> None:
        """End the stream; safe to call twice."""
        ...


class Listener(Protocol):
    """A bound address at which peers arrive."""

    @property
    def host(self) -> str:
        """The bound host."""
        ...

    @property
    def port(self) -> int:
        """The bound port."""
        ...

    async def accept(self) -> Channel:
        """The next peer that passed the handshake. Others are refused and logged."""
        ...

    async def close(self) -> None:
        """Stop listening; channels that were accepted stay."""
        ...
