"""The stages of a ring as the head knows them: who came, what place each has, how far each is."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable
from dataclasses import dataclass

from splitlm.bus.base import Event, Hub, PeerCame, PeerGone
from splitlm.core.cut import Cut, make_cut
from splitlm.core.errors import CutError, NetworkError, PeerLostError, PeerMissingError, ProtocolError
from splitlm.core.errors import from_exit_code as reported
from splitlm.core.messages import Assign, Connect, Join, Loaded, Ready, Report, Stop, Trouble
from splitlm.link.address import describe
from splitlm.node.settings import RingSettings


@dataclass
class Member:
    """A stage as the head knows it. ``node`` is 0 until it has a place."""

    peer: str
    join: Join
    node: int = 0
    loaded: Loaded | None = None
    ready: bool = False
    report: Report | None = None

    def __str__(self) -> str:
        return f"Node {self.node} ({self.join.name})" if self.node else f"The stage {self.join.name}"


class Members:
    """The stages of one ring, over the control plane.

    Args:
        say: takes one line of progress.
    """

    def __init__(self, hub: Hub, settings: RingSettings, say: Callable[[str], None]) -> None:
        self._hub, self._settings, self._say = hub, settings, say
        self._changed = asyncio.Condition()
        self._members: dict[str, Member] = {}
        self._complete = False

    @property
    def placed(self) -> list[Member]:
        """The stages that have a place, in the order of the ring."""
        return sorted((m for m in self._members.values() if m.node), key=lambda m: m.node)

    async def watch(self) -> None:
        """Hear the stages until cancelled.

        Raises:
            SplitlmError: a stage reported trouble, went away, or spoke out of turn.
        """
        while True:
            peer, event = await self._hub.receive()
            async with self._changed:
                await self._hear(peer, event)
                self._changed.notify_all()

    async def _hear(self, peer: str, event: Event) -> None:
        member = self._members.get(peer)
        match event:
            case PeerCame():
                pass
            case Join() as join if member is None:
                if self._complete:
                    await self._hub.send(peer, Trouble(NetworkError.exit_code, "The ring is complete"))
                else:
                    self._members[peer] = Member(peer, join)
            case Loaded() as loaded if member:
                member.loaded = loaded
            case Ready() if member:
                member.ready = True
            case Trouble(code=code, text=text) if member:
                raise reported(code, f"{member} stopped: {text}")
            case PeerGone() if member is None:
                pass
            case PeerGone(reason=reason) if member:
                if member.node:
                    raise PeerLostError(f"{member} is gone: {reason}".rstrip(". "))
                del self._members[peer]
            case other:
                await self._hub.drop(peer)
                if member is not None:
                    raise ProtocolError(f"{member} sent a {type(other).__name__} message out of turn")

    async def gather(self, cut: Cut | None, blocks: int) -> Cut:
        """Wait until every place has a stage.

        Args:
            cut: whose places are given out in the order of arrival; None where the stages bring theirs.
            blocks: of the model.

        Raises:
            PeerMissingError: not enough came in time.
            CutError: the places that stages bring do not make a cut.
        """
        if cut is not None:
            count = cut.stages - 1
            await self._until(
                lambda: len(self._members) >= count, f"{count} stages", lambda: f"{len(self._members)} came"
            )
            chosen = list(self._members.values())
            for extra in chosen[count:]:
                with contextlib.suppress(NetworkError):
                    await self._hub.send(extra.peer, Trouble(NetworkError.exit_code, "The ring is complete"))
            chosen = chosen[:count]
            if any(member.join.begin is not None for member in chosen):
                raise CutError(
                    "A stage came with a fixed place (--layer-begin), and the head gives the places",
                    remedy="Give the head its own --layer-begin and --layer-end, or start the stage with --join",
                )
        else:
            await self._until(lambda: self._tiles(blocks), "stages that hold every block", self._held)
            chosen = sorted(self._members.values(), key=lambda m: m.join.begin or 0)
            last = chosen[-1].join.end
            tail = blocks - last if self._settings.private and last is not None and last >= 0 else 0
            edges = [m.join.begin or 0 for m in chosen]
            cut = make_cut(blocks, edges, private=self._settings.private, tail_blocks=tail)
        self._complete = True
        for node, member in enumerate(chosen, start=1):
            member.node = node
        return cut

    def _tiles(self, blocks: int) -> bool:
        """Whether the fixed places that came, with the head's own, leave no block out."""
        at = self._settings.static or 0
        for member in sorted(self._members.values(), key=lambda m: m.join.begin or 0):
            begin, end = member.join.begin, member.join.end
            if begin is None or end is None:
                raise CutError(
                    f"{member} came without a fixed place",
                    remedy="Give it --layer-begin, --layer-end and its addresses",
                )
            if begin < at:
                raise CutError(f"{member} holds blocks from {begin}", expected=f"{at}, where the stage before it ends")
            if begin > at:
                return False
            at = end if end >= 0 else blocks
        return at == blocks or (self._settings.private and bool(self._members))

    def _held(self) -> str:
        places = [f"[{m.join.begin}, {m.join.end})" for m in self._members.values()]
        return f"besides the head, they hold {', '.join(places) or 'nothing'}"

    async def assign(self, cut: Cut, dtype: str) -> None:
        """Tell every stage its place and how to build it."""
        settings = self._settings
        for member in self.placed:
            await self._hub.send(
                member.peer,
                Assign(
                    node=member.node,
                    cut=cut,
                    model=settings.model,
                    family=settings.family,
                    loader=settings.loader,
                    dtype=dtype,
                    compute=settings.compute,
                    threads=settings.threads,
                    deadline_s=settings.deadline_s,
                    pace_ms=settings.pace_ms,
                ),
            )

    async def all_loaded(self) -> None:
        """Wait until every stage has built its blocks and listens. No deadline: disks differ, and death is seen."""
        await self._until(
            lambda: all(member.loaded for member in self.placed),
            "every stage to load its blocks",
            lambda: "",
            bounded=False,
        )

    async def introduce(self, data_port: int) -> None:
        """Tell every stage where to send: the next one, and the last one the head's own ``data_port``."""
        placed = self.placed
        for member, after in zip(placed, [*placed[1:], None], strict=True):
            host, port = self.address(after, member) if after else ("", data_port)
            await self._hub.send(member.peer, Connect(host, port))

    async def all_ready(self) -> None:
        """Wait until every stage is linked to both neighbours."""
        await self._until(
            lambda: all(member.ready for member in self.placed), "every stage to link to its neighbours", lambda: ""
        )

    def address(self, member: Member, asker: Member | None = None) -> tuple[str, int]:
        """Where a stage's data listener is, for the node that is to send to it (None: the head).

        Raises:
            NetworkError: the asker cannot reach it there.
        """
        if member.loaded is None:
            raise ProtocolError(f"{member} has no data listener yet", expected="it to load first")
        host = member.loaded.host or self._hub.address(member.peer)
        if asker is not None and _is_loopback(host) and not _is_loopback(self._hub.address(asker.peer)):
            raise NetworkError(
                f"{member} joined over {host}, where {asker} on another machine cannot reach it",
                expected="every stage to join by an address that the others can reach",
                remedy="Start it with --join and this machine's network address, or with --advertise",
            )
        return host, member.loaded.port

    async def _until(
        self, done: Callable[[], bool], what: str, so_far: Callable[[], str], *, bounded: bool = True
    ) -> None:
        deadline = self._settings.deadline_s
        self._say(f"waiting for {what}")
        try:
            async with asyncio.timeout(deadline if bounded else None), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            seen = so_far()
            raise PeerMissingError(
                f"The head waited {deadline:g} s for {what}" + (f"; {seen}" if seen else ""),
                where=describe(self._settings.listen),
                remedy="Start the missing stages with splitlm stage --join, or raise --deadline",
            ) from None

    async def dismiss(self, timeout_s: float) -> None:
        """Tell the stages to stop and hear their reports, for so long at most."""
        waiting = set()
        for member in self._members.values():
            with contextlib.suppress(NetworkError):
                await self._hub.send(member.peer, Stop())
                waiting.add(member.peer)
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                while waiting:
                    peer, event = await self._hub.receive()
                    if isinstance(event, Report) and peer in self._members:
                        self._members[peer].report = event
                    if isinstance(event, PeerGone | Report | Trouble):
                        waiting.discard(peer)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in ("localhost", "memory")
