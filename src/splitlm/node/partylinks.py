"""How a party is linked: a worker listens on two lanes, owners dial it, and everyone dials the aggregator."""

from __future__ import annotations

import asyncio
import socket
import ssl
from dataclasses import dataclass

from splitlm.core import training
from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.core.shape import Role
from splitlm.finetune.plane import LANES, Neighbour, Plane
from splitlm.finetune.window import Lane
from splitlm.link import tcp
from splitlm.model.device import Allocate
from splitlm.model.tunable import TunableFiles
from splitlm.node.identity import tuning_claims
from splitlm.wire.channel import Channel
from splitlm.wire.handshake import Identity
from splitlm.wire.pool import BufferPool, allocate_heap


@dataclass(frozen=True)
class LinkSettings:
    """How a party is reached.

    Attributes:
        host: that owners and the coordinator see; empty for the one that faces the coordinator.
        port: of the activation lane; the gradient lane takes the next one, or both take free ones where it is 0.
        bind: what is listened on; empty for ``host``.
        token: join secret.
        tls: contexts of the dialling and the listening side, or None.
        deadline_s: how long to wait for a neighbour.
        pool_bytes: bound of what a lane receives and was not computed yet.
        allocate: gives the memory for it.
    """

    host: str = ""
    port: int = 0
    bind: str = ""
    token: str = ""
    tls: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
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
        run: number of the run.
        hub_host: the coordinator's host as seen from here.
    """

    def __init__(
        self,
        settings: LinkSettings,
        files: TunableFiles,
        role: Role,
        number: int,
        name: str,
        run: str,
        hub_host: str,
    ) -> None:
        self._settings, self._role, self._number = settings, role, number
        self._hub_host = hub_host
        claims = tuning_claims(name, files, role=role, place=number, run=run)
        self._identity = Identity(claims, settings.token)
        self._doors: list[tcp.TcpListener] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._state: Channel | None = None
        # A pool of its own for each lane: full of activations, the one cannot keep gradients out.
        self._pools = {lane: BufferPool(settings.pool_bytes, settings.allocate) for lane in LANES}
        self._met: set[Neighbour] = set()
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
        """A worker's doors; its host and ports, to be told to owners. Owners have none."""
        settings = self._settings
        if self._role != "worker":
            return settings.host, 0, 0
        bind = settings.bind or settings.host or _facing(self._hub_host)
        ports = {}
        for i, lane in enumerate(reversed(LANES)):
            port = settings.port + i if settings.port else 0
            door = await tcp.listen(
                bind, port, self._identity, lane, pool=self._pools[lane], expect_peer="an owner", tls=_tls(settings, 1)
            )
            self._doors.append(door)
            ports[lane] = door.port
            self._tasks.append(asyncio.create_task(self._accept(door, lane, plane)))
        return settings.host, ports["activation"], ports["gradient"]

    async def meet(self, plane: Plane, peers: training.Peers, aggregator: tuple[str, int]) -> Channel:
        """Link to all that take part; the link to the aggregator.

        Raises:
            NetworkError: somebody did not come in time, or is not who it must be.
        """
        settings = self._settings
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

    async def _dial(self, plane: Plane, peer: training.Peer) -> None:
        who: Neighbour = ("worker", peer.worker)
        if who in plane.neighbours:
            return
        identity = self._identity.awaiting(peer.worker)
        for lane, port in (("activation", peer.activation), ("gradient", peer.gradient)):
            lane_: Lane = "activation" if lane == "activation" else "gradient"
            channel = await tcp.connect(
                peer.host or self._hub_host,
                port,
                identity,
                lane_,
                deadline_s=self._settings.deadline_s,
                who=f"worker {peer.worker}",
                pool=self._pools[lane_],
                tls=_tls(self._settings, 0),
            )
            plane.attach(who, lane_, channel)

    async def _dial_aggregator(self, at: tuple[str, int]) -> Channel:
        return await tcp.connect(
            at[0] or self._hub_host,
            at[1],
            self._identity,
            "state",
            deadline_s=self._settings.deadline_s,
            who="the aggregator",
            tls=_tls(self._settings, 0),
        )

    async def _accept(self, door: tcp.TcpListener, lane: Lane, plane: Plane) -> None:
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


def _tls(settings: LinkSettings, side: int) -> ssl.SSLContext | None:
    return settings.tls[side] if settings.tls is not None else None


def _facing(hub_host: str) -> str:
    """This machine's address that routes to the coordinator."""
    if hub_host in ("", "memory"):
        return "127.0.0.1"
    with socket.socket(socket.AF_INET6 if ":" in hub_host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((hub_host, 9))
            host: str = probe.getsockname()[0]
            return host
        except OSError:
            return "127.0.0.1"
