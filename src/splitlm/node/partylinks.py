"""How a party is linked: a worker listens on two lanes, owners dial it, and everyone dials the aggregator."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from splitlm.core import training
from splitlm.core.config import RunConfig
from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.core.shape import Role
from splitlm.finetune.plane import LANES, Neighbour, Plane
from splitlm.finetune.window import Lane
from splitlm.link.local import facing, loopback
from splitlm.model.device import Allocate
from splitlm.model.tunable import TunableFiles
from splitlm.node.guard import Guard
from splitlm.node.identity import aggregator_claims, tuning_claims
from splitlm.node.ways import Direct, Door, Way, open_way
from splitlm.wire.channel import Channel, Listener
from splitlm.wire.handshake import Identity
from splitlm.wire.pool import BufferPool, allocate_heap


@dataclass(frozen=True)
class LinkSettings:
    """How a party is reached.

    Attributes:
        host: that owners see; empty for the address that routes to the coordinator.
        port: of the activation lane; the gradient lane takes the next one, or both take free ones where it is 0.
        bind: what is listened on; empty for ``host``.
        token: join secret.
        guard: whether links are to be over TLS, and with which certificate.
        deadline_s: how long to wait for a neighbour.
        pool_bytes: bound of what a lane receives and was not computed yet.
        allocate: gives the memory for it.
    """

    host: str = ""
    port: int = 0
    bind: str = ""
    token: str = ""
    guard: Guard = field(default_factory=Guard)
    deadline_s: float = 60.0
    pool_bytes: int = 67108864
    allocate: Allocate = allocate_heap


class PartyLinks:
    """The doors and the links of one party.

    Args:
        settings: how it is reached.
        files: its model, whose hashes are claimed.
        role: what it is.
        number: of it among those of its role.
        name: how it calls itself.
        start: what the coordinator said: the run's number, and where the aggregator is.
        hub_host: the coordinator's host as seen from here.
        config: of the run, with this machine's own ways to the broker and to certificates.
    """

    def __init__(
        self,
        settings: LinkSettings,
        files: TunableFiles,
        role: Role,
        number: int,
        name: str,
        start: training.Start,
        hub_host: str,
        config: RunConfig,
    ) -> None:
        self._settings, self._role, self._number = settings, role, number
        self._start, self._hub_host, self._config = start, hub_host, config
        claims = tuning_claims(name, files, role=role, place=number, run=start.run)
        self._identity = Identity(claims, settings.token)
        self._way: Way = Direct()
        self._host = settings.host
        self._doors: list[Listener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._state: Channel | None = None
        # A pool of its own for each lane: full of activations, the one cannot keep gradients out.
        self._pools = {lane: BufferPool(settings.pool_bytes, settings.allocate) for lane in LANES}
        self._averages_at: tuple[str, int] | None = None
        self._came = asyncio.Event()

    @property
    def pool_counts(self) -> tuple[int, int]:
        """Buffers that were made for what is received, and how often one was used again."""
        pools = self._pools.values()
        return sum(pool.allocations for pool in pools), sum(pool.reuses for pool in pools)

    @property
    def state_bytes(self) -> tuple[int, int]:
        """Bytes that came from the aggregator, and went there."""
        return (self._state.bytes_in, self._state.bytes_out) if self._state is not None else (0, 0)

    async def listen(self, plane: Plane) -> tuple[str, int, int]:
        """A worker's doors; its host and ports, to be told to owners. Owners have none.

        Raises:
            UsageError: there is no certificate where links are over TLS.
            PeerRefusedError: the run is over TLS and this machine's links are not to be, or the other way round.
            NetworkError: a port is taken, or the broker is not there.
        """
        settings, config = self._settings, self._config
        host = self._host = settings.host or await asyncio.to_thread(facing, self._hub_host)
        ends = [host, self._hub_host, self._start.aggregator[0]]
        if config.learning.u_shape.transport == "rabbitmq":
            ends = [config.rabbit.address]
        tls = settings.guard.agreed(config.security.tls, *ends)
        self._way = await open_way(config, self._start.run, tls)
        if self._role != "worker":
            return host, 0, 0
        ports = {}
        for i, lane in enumerate(reversed(LANES)):
            port = settings.port + i if settings.port else 0
            place = Door("worker", self._number, lane, settings.bind or host, port)
            door = await self._way.listen(place, self._identity, expect_peer="an owner", pool=self._pools[lane])
            self._doors.append(door)
            ports[lane] = door.port
            self._tasks.append(asyncio.create_task(self._accept(door, lane, plane)))
        return host, ports["activation"], ports["gradient"]

    async def listen_states(self) -> Listener:
        """The aggregator's door at this worker, after ``listen``; the caller closes it.

        Raises:
            NetworkError: the port is taken, or the broker is not there.
        """
        settings = self._settings
        bind, port = settings.bind or self._host, settings.port + len(LANES) if settings.port else 0
        claims = aggregator_claims(self._start.run)
        place = Door("aggregator", 0, "state", bind, port)
        door = await self._way.listen(place, Identity(claims, settings.token), expect_peer="a party")
        self._averages_at = bind, door.port  # its own way there is no other's: a NAT may lead nobody back
        return door

    async def meet(self, plane: Plane, peers: training.Peers, aggregator: tuple[str, int]) -> Channel:
        """Link to all that take part; the link to the aggregator.

        Raises:
            NetworkError: somebody did not come in time, or is not who it must be.
        """
        settings = self._settings
        self._check_plain([peer.host for peer in peers.workers])
        try:
            async with asyncio.TaskGroup() as group:
                state = group.create_task(self._dial_aggregator(aggregator))
                if self._role == "owner":
                    for peer in peers.workers:
                        group.create_task(self._dial(plane, peer))
                else:
                    group.create_task(self._awaited({("owner", n) for n in peers.owners}, plane))
            self._state = state.result()
            return self._state
        except* SplitlmError as errors:
            raise first_error(errors) from None
        except* TimeoutError:
            raise NetworkError(f"Not all owners linked to this worker within {settings.deadline_s:g} s") from None

    async def close(self) -> None:
        """Close the doors, and the link to the aggregator."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(door.close() for door in self._doors))
        if self._state is not None:
            await self._state.close()
        await self._way.close()

    def _check_plain(self, hosts: list[str]) -> None:
        """Where TLS is to be on by itself, no plain link leaves this machine, whoever was told of it late."""
        away = [host for host in hosts if not loopback(host)]
        if self._settings.guard.mode == "auto" and away and isinstance(self._way, Direct) and self._way.tls is None:
            raise NetworkError(
                f"A worker is at {away[0]}, on another machine, and the run's links are plain",
                expected="links over TLS",
                remedy="Set security.tls: on everywhere, with each node's own folder of splitlm certs",
            )

    async def _dial(self, plane: Plane, peer: training.Peer) -> None:
        who: Neighbour = ("worker", peer.worker)
        if who in plane.neighbours:
            return
        identity, pools, deadline_s = self._identity.awaiting(peer.worker), self._pools, self._settings.deadline_s
        host = peer.host or self._hub_host
        lanes: list[tuple[Lane, int]] = [("activation", peer.activation), ("gradient", peer.gradient)]
        for lane, port in lanes:
            door = Door("worker", peer.worker, lane, host, port)
            channel = await self._way.dial(
                door, identity, deadline_s=deadline_s, who=f"worker {peer.worker}", pool=pools[lane]
            )
            plane.attach(who, lane, channel)

    async def _dial_aggregator(self, at: tuple[str, int]) -> Channel:
        host, port = self._averages_at or at
        door = Door("aggregator", 0, "state", host or self._hub_host, port)
        return await self._way.dial(door, self._identity, deadline_s=self._settings.deadline_s, who="the aggregator")

    async def _accept(self, door: Listener, lane: Lane, plane: Plane) -> None:
        while True:
            try:
                channel = await door.accept()
            except NetworkError:
                return
            try:
                plane.attach(("owner", channel.claims.place), lane, channel)
            except NetworkError:
                await channel.close()
            self._came.set()

    async def _awaited(self, owners: set[Neighbour], plane: Plane) -> None:
        async with asyncio.timeout(self._settings.deadline_s):
            while not owners <= plane.neighbours:
                self._came.clear()
                await self._came.wait()
