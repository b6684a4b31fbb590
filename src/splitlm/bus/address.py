"""Where a broker is, and its refusals in our words."""

from __future__ import annotations

import asyncio
import logging
import ssl
from dataclasses import dataclass, field

import aio_pika
from aio_pika import exceptions as amqp

from splitlm.core.errors import AddressBusyError, NetworkError, PeerMissingError, PeerRefusedError, ProtocolError
from splitlm.wire.tls import explain

CONNECT_S = 10.0
LATE_S = 1.0
"""How long whoever gives up waits for a connection that is under way, to close it."""
HEARTBEAT_S = 10
"""Of the connection to the broker; ours to the peers is bus/line.py's."""
_NOWHERE = logging.NullHandler()
"""The library logs each failure that is raised as well; where nobody asked for its log, one paragraph is enough."""


@dataclass(frozen=True)
class Address:
    """Where a broker is and how it lets us in."""

    host: str
    port: int
    username: str = "guest"
    password: str = field(default="guest", repr=False)
    virtual_host: str = "/"
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


async def connect(where: Address, name: str) -> aio_pika.abc.AbstractConnection:
    """One connection, which the broker's list shows under this name.

    Raises:
        PeerMissingError: no broker is there.
        PeerRefusedError: it does not let us in.
    """
    for library in ("aiormq", "aio_pika"):
        logging.getLogger(library).addHandler(_NOWHERE)
    opening = asyncio.create_task(_open(where, name))
    try:
        async with asyncio.timeout(CONNECT_S):
            return await _whole(opening)
    except TimeoutError:
        raise PeerMissingError(
            f"The broker did not answer within {CONNECT_S:g} s", where=str(where), expected="RabbitMQ"
        ) from None
    except (UnicodeError, *amqp.CONNECTION_EXCEPTIONS) as error:  # the first is a host that can be no name
        raise refused(error, where) from None


async def _open(where: Address, name: str) -> aio_pika.abc.AbstractConnection:
    return await aio_pika.connect(
        host=where.host,
        port=where.port,
        login=where.username,
        password=where.password,
        virtualhost=where.virtual_host,
        ssl=where.tls is not None,
        ssl_context=where.tls,
        client_properties={"connection_name": name},
        heartbeat=HEARTBEAT_S,
    )


async def _whole(opening: asyncio.Task[aio_pika.abc.AbstractConnection]) -> aio_pika.abc.AbstractConnection:
    """The connection. Cancelled while it opens, the library would leave a socket and tasks behind: it may end first."""
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait({opening}, timeout=LATE_S)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            await opening.result().close()
        opening.cancel()
        raise


def refused(error: BaseException, where: Address) -> NetworkError:
    """The error of ours for a connection that did not come about; the password is in none."""
    text = " ".join(str(error).split()) or type(error).__name__
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:  # the library makes circles
        if isinstance(cause, ssl.SSLError):
            return explain(cause, str(where))
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    match error:
        case amqp.ProbableAuthenticationError() | amqp.AuthenticationError():
            return PeerRefusedError(
                f"The broker refused the user {where.username!r}",
                where=str(where),
                expected="a user name and a password that it knows",
                remedy="Check rabbit.username and rabbit.password; guest may only come from the broker's own machine",
            )
        case amqp.ChannelPreconditionFailed():
            return AddressBusyError(
                "Another process uses the queue of this run",
                where=str(where),
                expected="one coordinator for each name of a run",
                remedy="Stop the other one, or choose another name",
            )
        case amqp.InvalidFrameError() if "Connection.Close" not in text:  # else its answer to the virtual host
            return _no_broker(where)
        case amqp.ConnectionClosed() | amqp.AMQPChannelError() | amqp.InvalidFrameError():
            return PeerRefusedError(
                f"The broker refused the virtual host {where.virtual_host!r} to {where.username!r}",
                where=str(where),
                expected="one that it has, and where this user may make queues",
                remedy="Check rabbit.virtual-host, and what this user may do there",
            )
        case amqp.IncompatibleProtocolError() | amqp.ProtocolSyntaxError():
            return _no_broker(where)
        case _ if any(isinstance(link, ConnectionResetError | BrokenPipeError) for link in chain):  # it hung up
            return _no_broker(where)
        case amqp.AMQPConnectionError() if "reset" in text or "closed" in text:  # the same, in the library's words
            return _no_broker(where)
        case _:
            return PeerMissingError(
                f"The broker cannot be reached ({text})",
                where=str(where),
                expected="RabbitMQ to listen there",
                remedy="Check that it runs, rabbit.address and rabbit.port, and that no firewall is in between",
            )


def _no_broker(where: Address) -> ProtocolError:
    # After TLS 1.3's handshake a broker may end the connection before its word on our certificate is read.
    tls = where.tls is not None
    return ProtocolError(
        "What listens there is no RabbitMQ broker, or " + ("refused our certificate" if tls else "wants TLS"),
        where=str(where),
        expected="AMQP 0-9-1 over TLS" if tls else "AMQP 0-9-1",
        remedy="Check rabbit.address and rabbit.port, and "
        + ("that the broker knows the CA of our certificate" if tls else "rabbit.tls where the broker wants it"),
    )
