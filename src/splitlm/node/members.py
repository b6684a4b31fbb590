"""The stages of a ring as the head knows them: who came, what place each has, how far each is."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from splitlm.bus.base import Event, Hub, PeerCame, PeerGone
from splitlm.core import messages
from splitlm.core.cut import Cut, make_cut
from splitlm.core.errors import CutError, NetworkError, PeerLostError, PeerMissingError, ProtocolError, SplitlmError
from splitlm.core.errors import from_exit_code as reported
from splitlm.core.messages import (
    Assign,
    Connect,
    Done,
    Join,
    Loaded,
    Message,
    Nack,
    Prepared,
    Ready,
    Report,
    Staged,
    Stop,
    Trouble,
    trouble,
)
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
        return f"Node {self.node} ({self.join.name})" if self.node else f"The {self.join.name}"


class Members:
    """The stages of one ring, over the control plane.

    Args:
        say: takes one line of progress.
        barrier: takes a stage's part in barriers: its node and what it said.
        lost: told that a stage at a node is gone, and why; returns what was going on, in words, or nothing.
        fate: what this machine knows of a lost stage's end, by its name; empty for nothing.
    """

    def __init__(
        self,
        hub: Hub,
        settings: RingSettings,
        say: Callable[[str], None],
        fate: Callable[[str], Awaitable[str]] | None = None,
        barrier: Callable[[int, messages.Any], None] | None = None,
        lost: Callable[[int, str], str] | None = None,
    ) -> None:
        self._barrier, self._lost = barrier, lost
        self._hub, self._settings, self._say, self._fate = hub, settings, say, fate
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
                    await self._turn_away(peer)
                else:
                    self._members[peer] = Member(peer, join)
            case Loaded() as loaded if member and member.node and member.loaded is None:
                member.loaded = loaded
            case Ready() if member and member.loaded and not member.ready:
                member.ready = True
            case Prepared() | Nack() | Done() | Staged() if member and member.ready and self._barrier:
                self._barrier(member.node, event)
            case Trouble(code=code, text=text) if member and member.node:
                raise reported(code, f"{member} stopped: {text.rstrip('. ')}{self._meanwhile(member, text)}")
            case PeerGone(reason=reason) if member and member.node:
                meanwhile = self._meanwhile(member, reason)  # at once: what it did not answer is not awaited any more
                fate = await self._fate(member.join.name) if self._fate else ""
                why = f"its process {fate}" if fate else reason
                raise PeerLostError(f"{member} is gone: {why.rstrip('. ')}{meanwhile}")
            case PeerGone() | Trouble():
                # It has no part in the ring yet, or never had one: the others go on without it.
                if self._members.pop(peer, None) is not None:
                    self._say(f"{member} left")
            case other:
                await self._hub.drop(peer)
                if member is not None:
                    raise ProtocolError(f"{member} sent a {type(other).__name__} message out of turn")

    def _meanwhile(self, member: Member, reason: str) -> str:
        """What the ring was doing when a stage was lost, as the end of a sentence."""
        standing = self._lost(member.node, reason) if self._lost else ""
        return f"; the head was {standing}" if standing else ""

    async def gather(self, cut: Cut | None, blocks: int) -> Cut:
        """Wait until every place has a stage.

        Args:
            cut: whose places are given out in the order of arrival; None where the stages bring theirs.
            blocks: of the model.

        Raises:
            PeerMissingError: not enough came in time.
            CutError: the places that stages bring do not make a cut.
        """
        extra: list[str] = []
        if cut is not None:
            count = cut.stages - 1
            await self._until(
                lambda: len(self._members) >= count,
                f"{count} stage{'s' * (count > 1)}",
                lambda: f"{len(self._members)} came",
            )
            chosen, extra = list(self._members.values())[:count], list(self._members)[count:]
            if any(member.join.begin is not None for member in chosen):
                raise CutError(
                    "A stage came with a fixed place (--layer-begin), and the head gives the places",
                    remedy="Give the head its own --layer-begin and --layer-end, or start the stage with --join",
                )
        else:
            cut, chosen = await self._tile(blocks)
        self._complete = True
        for node, member in enumerate(chosen, start=1):
            member.node = node
        for peer in extra:  # after the places are given: one that is lost meanwhile is missed
            del self._members[peer]
            await self._turn_away(peer)
        return cut

    async def _turn_away(self, peer: str) -> None:
        with contextlib.suppress(NetworkError):
            await self._hub.send(peer, trouble(NetworkError("The ring is complete")))

    async def _tile(self, blocks: int) -> tuple[Cut, list[Member]]:
        """Wait until the places that stages bring, with the head's own, hold every block."""
        settings = self._settings
        end = blocks - settings.tail_blocks
        if not 0 <= (settings.static or 0) < end:
            raise CutError(
                f"The head's own place ends at block {settings.static}",
                where="--layer-end",
                expected=f"a number below {end}, so that blocks are left for the other stages",
            )
        try:
            await self._until(lambda: self._first_gap(end) == end, "stages that hold every block", self._held)
        except PeerMissingError as late:
            if not self._members:
                raise
            raise CutError(
                f"{late.what}: nobody holds block {self._first_gap(end)}",
                where=late.where,
                expected=f"places that hold the blocks from {settings.static or 0} to {end - 1}, each once",
                remedy="Start the stage that is missing, or change --layer-begin and --layer-end",
            ) from None
        chosen = sorted(self._members.values(), key=lambda m: m.join.begin or 0)
        edges = [m.join.begin or 0 for m in chosen]
        return make_cut(blocks, edges, private=settings.private, tail_blocks=settings.tail_blocks), chosen

    def _first_gap(self, blocks: int) -> int:
        """The first block that neither the head nor a stage that came holds; ``blocks`` when there is none."""
        at, before = self._settings.static or 0, "the head"
        for member in sorted(self._members.values(), key=lambda m: m.join.begin or 0):
            begin, end = member.join.begin, member.join.end
            if begin is None or end is None:
                raise CutError(
                    f"{member} came without a fixed place",
                    remedy="Give it --layer-begin, --layer-end and its addresses",
                )
            if begin < at:
                raise CutError(
                    f"{member} holds blocks from {begin}, which {before} holds already",
                    expected=f"{at}, where that one ends",
                    remedy="Start one stage for each place",
                )
            end = end if end >= 0 else blocks
            if not begin < end <= blocks:
                raise CutError(f"{member} holds blocks [{begin}, {end})", expected=f"blocks below {blocks}")
            if begin > at:
                break
            at, before = end, member.join.name
        return at

    def _held(self) -> str:
        places = [f"[{m.join.begin}, {m.join.end})" for m in self._members.values()]
        return f"besides the head, they hold {', '.join(places) or 'nothing'}"

    async def assign(self, cut: Cut, dtype: str, ring: str, config: str = "") -> None:
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
                    compute=settings.compute_of(member.node),
                    threads=settings.threads,
                    deadline_s=settings.deadline_s,
                    pace_ms=settings.pace_of(member.node),
                    ring=ring,
                    config=config,
                    barrier_s=settings.ctrl_timeout_s,
                ),
            )

    @property
    def engines(self) -> dict[int, tuple[str, str]]:
        """Of each node that has loaded, its engine and what it has to say of it."""
        return {m.node: (m.loaded.compute, m.loaded.note) for m in self.placed if m.loaded is not None}

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
            move_port = after.loaded.move_port if after and after.loaded else 0
            await self._hub.send(member.peer, Connect(host, port, move_port))

    async def all_ready(self) -> None:
        """Wait until every stage is linked to both neighbours."""
        await self._until(
            lambda: all(member.ready for member in self.placed), "every stage to link to its neighbours", lambda: ""
        )

    async def send(self, node: int, message: Message) -> None:
        """Say something to the stage at this place.

        Raises:
            PeerLostError: it is gone.
        """
        await self._hub.send(self.placed[node - 1].peer, message)

    def address(self, member: Member, asker: Member | None = None) -> tuple[str, int]:
        """Where a stage's data listener is, for the node that is to send to it (None: the head).

        A stage with a fixed place sends where its user said, wherever this stage joined from.

        Raises:
            NetworkError: the asker cannot reach it there.
        """
        if member.loaded is None:
            raise ProtocolError(f"{member} has no data listener yet", expected="it to load first")
        host = member.loaded.host or self._hub.address(member.peer)
        told = asker if asker is not None and asker.join.begin is None else None
        if told is not None and _is_loopback(host) and not _is_loopback(self._hub.address(told.peer)):
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

    async def dismiss(self, timeout_s: float, ended: SplitlmError | None) -> set[str]:
        """Tell the stages to stop, or why the head gives up, and hear their reports; for so long at most.

        Returns:
            The names of the stages that answered or went.
        """
        word = Stop() if ended is None else trouble(ended)
        waiting = set(self._members)
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(timeout_s):
                lost = {peer for peer in self._members if not await self._told(peer, word)}
                while waiting - lost:
                    peer, event = await self._hub.receive()
                    if isinstance(event, Report) and peer in self._members:
                        self._members[peer].report = event
                    if isinstance(event, PeerGone | Report | Trouble):
                        waiting.discard(peer)
        return {member.join.name for peer, member in self._members.items() if peer not in waiting}

    async def _told(self, peer: str, word: Message) -> bool:
        try:
            await self._hub.send(peer, word)
        except NetworkError:
            return False
        return True


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host in ("localhost", "memory")
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
