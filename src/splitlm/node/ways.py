"""How tensors travel in training: over TCP between the parties, or through the broker, for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from aio_pika.abc import AbstractConnection

from splitlm.bus.address import Address
from splitlm.bus.address import connect as reach
from splitlm.core.config import RunConfig
from splitlm.core.errors import UsageError
from splitlm.link import rabbitmq, tcp
from splitlm.link.local import loopback
from splitlm.node.guard import Guard
from splitlm.wire.channel import Channel, Listener
from splitlm.wire.handshake import Identity
from splitlm.wire.pool import BufferPool
from splitlm.wire.states import Purpose
from splitlm.wire.tls import Security


@dataclass(frozen=True)
class Door:
    """Where links of one kind arrive: over TCP at a host and port, at the broker under a name.

    Attributes:
        role: whose it is: a worker's, or the aggregator's.
        number: of it among those of its role.
        lane: what the links are for.
        host: of TCP.
        port: of TCP; 0 takes a free one.
    """

    role: str
    number: int
    lane: Purpose
    host: str = ""
    port: int = 0


class Way(Protocol):
    """How links come about."""

    async def listen(
        self, door: Door, identity: Identity, *, expect_peer: str, pool: BufferPool | None = None
    ) -> Listener:
        """Let links arrive at a door of ours.

        Raises:
            NetworkError: it cannot be opened.
        """
        ...

    async def dial(
        self, door: Door, identity: Identity, *, deadline_s: float, who: str, pool: BufferPool | None = None
    ) -> Channel:
        """Link to another's door, and wait for it while it is not there yet.

        Raises:
            NetworkError: it never was, or the two sides do not agree.
        """
        ...

    async def close(self) -> None:
        """After all doors and links."""
        ...


@dataclass(frozen=True)
class Direct:
    """Over TCP; ``tls`` is None where links are plain."""

    tls: Security | None = None

    async def listen(
        self, door: Door, identity: Identity, *, expect_peer: str, pool: BufferPool | None = None
    ) -> Listener:
        """See ``Way``."""
        context = self.tls.listening if self.tls else None
        return await tcp.listen(
            door.host, door.port, identity, door.lane, pool=pool, expect_peer=expect_peer, tls=context
        )

    async def dial(
        self, door: Door, identity: Identity, *, deadline_s: float, who: str, pool: BufferPool | None = None
    ) -> Channel:
        """See ``Way``."""
        context = self.tls.dialling if self.tls else None
        return await tcp.connect(
            door.host, door.port, identity, door.lane, deadline_s=deadline_s, who=who, pool=pool, tls=context
        )

    async def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class Brokered:
    """Through the broker; ``run`` is the run's number, which tells its queues from those of others."""

    connection: AbstractConnection
    run: str

    def _name(self, door: Door) -> str:
        return f"splitlm.{self.run}.links.{door.role}.{door.number}.{door.lane}"

    async def listen(
        self, door: Door, identity: Identity, *, expect_peer: str, pool: BufferPool | None = None
    ) -> Listener:
        """See ``Way``; who is expected shows in no message of its."""
        _ = expect_peer
        return await rabbitmq.listen(self.connection, self._name(door), identity, door.lane, pool=pool)

    async def dial(
        self, door: Door, identity: Identity, *, deadline_s: float, who: str, pool: BufferPool | None = None
    ) -> Channel:
        """See ``Way``."""
        return await rabbitmq.connect(
            self.connection, self._name(door), identity, door.lane, deadline_s=deadline_s, who=who, pool=pool
        )

    async def close(self) -> None:
        """Part from the broker."""
        await self.connection.close()


def broker_address(config: RunConfig) -> Address:
    """The broker of the settings.

    Raises:
        UsageError: it is to be reached over TLS, and the certificates are no good.
    """
    rabbit = config.rabbit
    tls = Guard.of(config).broker(rabbit.tls)
    return Address(*rabbit.reached_at, rabbit.username, rabbit.password, rabbit.virtual_host, tls)


async def open_way(config: RunConfig, run: str, tls: bool) -> Way:
    """The way that ``learning.u-shape.transport`` names.

    Args:
        config: of the run, with this machine's own ``rabbit`` and ``security.certs``.
        run: number of the run.
        tls: whether links are to be over TLS.

    Raises:
        UsageError: they are, and there is no certificate; or the broker's links are not.
        NetworkError: the broker is not there, or does not let us in.
    """
    if config.learning.u_shape.transport == "tcp":
        return Direct(Guard.of(config).load(tls))
    where = broker_address(config)
    if tls and where.tls is None and not loopback(where.host):
        raise UsageError(
            "Tensors are to go through the broker, and the way to it is not over TLS",
            where="rabbit.tls",
            expected="rabbit.tls: true, or security.tls: off",
        )
    return Brokered(await reach(where, f"splitlm {run}"), run)
