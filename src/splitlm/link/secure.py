"""TLS under a channel: bytes are encrypted between the channel and its TCP transport, and nothing else changes.

asyncio's own TLS cannot close one direction alone, so that last words would race the end of the connection; this one
keeps the ways of TCP: what was written before ``write_eof`` arrives, and reading goes on after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import Any

from splitlm.link.base import StreamChannel
from splitlm.wire.tls import explain, not_tls

RECORD = 256 * 1024
"""Plain bytes that are encrypted before they go to the transport."""
FIRST_BYTES = (20, 21, 22, 23)
"""Kinds of TLS records; a frame of ours begins with none of them."""


class SecureTransport(asyncio.Transport):
    """What the channel writes to. Made by ``Secured``."""

    def __init__(self, raw: asyncio.Transport, session: Secured) -> None:
        super().__init__()
        self._raw, self._session = raw, session

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As TCP's; ``sslcontext`` says that the socket carries no plain bytes."""
        return self._session.context if name == "sslcontext" else self._raw.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """Whether it is closing or closed."""
        return self._raw.is_closing()

    def close(self) -> None:
        """Close once everything is written."""
        self._session.finish()
        self._raw.close()

    def abort(self) -> None:
        """Close at once."""
        self._raw.abort()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes; before the handshake is done they wait for it."""
        self._session.write(data)

    def can_write_eof(self) -> bool:
        """Always."""
        return True

    def write_eof(self) -> None:
        """Nothing follows; reading goes on."""
        self._session.finish()
        if self._raw.can_write_eof() and not self._raw.is_closing():
            self._raw.write_eof()

    def pause_reading(self) -> None:
        """Hand nothing to the channel until ``resume_reading``."""
        self._session.paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Go on, with what is here already first."""
        self._session.paused = False
        self._raw.resume_reading()
        asyncio.get_running_loop().call_soon(self._session.pump)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """As TCP's, in encrypted bytes."""
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        """Encrypted bytes that the kernel does not have yet."""
        return self._raw.get_write_buffer_size()


class Secured(asyncio.Protocol):
    """Stands between a TCP transport and a channel.

    Args:
        context: of the listening or the dialling side.
        server_side: whether this is the listener.
        where: the peer, for messages.
        make: the channel; None drops the connection.
    """

    def __init__(
        self, context: ssl.SSLContext, server_side: bool, where: str, make: Callable[[], StreamChannel | None]
    ) -> None:
        self.context, self.paused = context, False
        self._server_side, self._where, self._make = server_side, where, make
        self._into, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._into, self._out, server_side=server_side)
        self._raw: asyncio.Transport | None = None
        self._channel: StreamChannel | None = None
        self._early: list[bytes] = []
        self._greeted = self._open = self._plain = self._failed = self._ended = self._finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TCP is there: the channel begins, and what it writes waits for the handshake."""
        if not isinstance(transport, asyncio.Transport):
            raise TypeError("a stream transport is needed")
        self._raw = transport
        self._channel = self._make()
        if self._channel is None:
            transport.abort()
            return
        self._channel.connection_made(SecureTransport(transport, self))
        self.pump()

    def data_received(self, data: bytes) -> None:
        """Encrypted bytes came."""
        if self._failed or self._channel is None:
            return
        if not self._greeted:
            self._greeted = True
            if data[0] not in FIRST_BYTES:
                self._plain = self._server_side  # who speaks plainly is told so plainly
                self._failed = True
                self._channel.refuse(not_tls(self._where))
                return
        self._into.write(data)
        self.pump()

    def eof_received(self) -> bool:
        """The peer sends no more; whether the connection stays until ``pump`` has handed on what came before."""
        self._ended = True
        self.pump()
        return not self._failed

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._failed = True
        if self._channel is not None:
            self._channel.connection_lost(exc)

    def pause_writing(self) -> None:
        """The kernel takes no more."""
        if self._channel is not None:
            self._channel.pause_writing()

    def resume_writing(self) -> None:
        """The kernel took everything."""
        if self._channel is not None:
            self._channel.resume_writing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt and send; keep it where the handshake is not done."""
        if self._raw is None or self._finished:
            return
        if self._failed:
            if self._plain:
                self._raw.write(data)
            return
        if not self._open:
            self._early.append(bytes(data))
            return
        view = memoryview(data).cast("B")
        try:
            while len(view):
                view = view[self._tls.write(view[:RECORD]) :]
                self._flush()
        except ssl.SSLError:  # the session broke in an earlier read, which has told why
            self._raw.abort()

    def finish(self) -> None:
        """Say to the peer that nothing follows."""
        if self._open and not self._failed and not self._finished:
            # The peer may still be sending: then this raises, but what it is to say has been said.
            with contextlib.suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
        self._finished = True

    def pump(self) -> None:
        """Decrypt what came, as far as the channel takes it."""
        channel, raw = self._channel, self._raw
        if channel is None or raw is None or self._failed:
            return
        try:
            if not self._open:
                self._tls.do_handshake()
                self._open = True
                self._flush()
                early, self._early = self._early, []
                for data in early:
                    self.write(data)
            while not self.paused and not raw.is_closing():
                count = _read_into(self._tls, memoryview(channel.get_buffer(-1)))
                if not count:
                    self._ended = True
                    break
                channel.buffer_updated(count)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._ended = True
        except ssl.SSLError as error:
            self._failed = True
            self._flush()  # the alert that tells the peer
            channel.refuse(explain(error, self._where))
            return
        self._flush()
        if self._ended and not self.paused:
            self._failed = True  # nothing more is read
            channel.eof_received()
            raw.close()  # after the channel's last words, as TCP's transport does

    def _flush(self) -> None:
        data = self._out.read()
        if data and self._raw is not None:
            self._raw.write(data)


def _read_into(session: ssl.SSLObject, buffer: memoryview) -> int:
    """Plain bytes into a buffer; how many. (The type that is known of this call is of the one without a buffer.)"""
    count: Any = session.read(buffer.nbytes, buffer)  # type: ignore[arg-type,unused-ignore]
    return int(count)
