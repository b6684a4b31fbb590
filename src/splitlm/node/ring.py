"""The head's side: gather stages, give each its place, link them, and keep the ring until it is closed or breaks."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from splitlm.bus.base import PeerCame, PeerGone
from splitlm.bus.star import StarHub
from splitlm.core.cut import Cut, balanced_boundaries, make_cut
from splitlm.core.errors import CutError, NetworkError, PeerLostError, PeerMissingError, ProtocolError, SplitlmError
from splitlm.core.errors import from_exit_code as reported
from splitlm.core.groups import first_error
from splitlm.core.messages import Assign, Connect, Join, Loaded, Ready, Report, Stop, Trouble
from splitlm.infer.head import Head
from splitlm.infer.meter import Meter
from splitlm.link import tcp
from splitlm.link.address import describe
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.payload import dtype_name
from splitlm.model.runner import Runner
from splitlm.node.build import BuildSettings, Built, build_node
from splitlm.node.identity import claims_for, node_name, stranger
from splitlm.node.processes import StageProcess, end_all
from splitlm.telemetry.memory import peak_rss_bytes
from splitlm.telemetry.sinks import NullTrace, Sink, Trace, trace_path
from splitlm.wire.channel import Channel
from splitlm.wire.handshake import Identity

GRACE_S = 1.0
REPORT_S = 3.0
POLL_S = 0.2
MIB = 2**20
T = TypeVar("T")

Spawn = Callable[[int, int], list[StageProcess]]
"""Starts so many stage processes that join this control port."""


@dataclass(frozen=True)
class RingSettings:
    """What a ring is to be.

    Attributes:
        model: hub id, directory or well-known name; ``folder`` is where it lies here.
        stages: number of nodes, the head included; ignored where ``cuts`` are given.
        cuts: block boundaries, None for balanced ones.
        private: final norm and head on the head's node too, with ``tail_blocks`` final blocks.
        static: the stages' places come from their own flags; the head holds blocks ``[0, static)``.
        listen: address of the control port; port 0 takes a free one.
        data: address for the last node's link; an empty host is that of ``listen``.
        send: address of node 1, where places are static.
        deadline_s: how long to wait for stages, and stages for each other.
        trace_dir: where records go; None turns them off.
    """

    model: str
    folder: Path
    stages: int = 1
    cuts: tuple[int, ...] | None = None
    private: bool = False
    tail_blocks: int = 0
    static: int | None = None
    family: str = ""
    loader: Loader = "shard"
    dtype: str = "auto"
    compute: str = "exact"
    threads: int = 0
    pace_ms: float = 0.0
    prefill_chunk: int = 128
    token: str = ""
    listen: tuple[str, int] = ("127.0.0.1", 0)
    data: tuple[str, int] = ("", 0)
    send: tuple[str, int] = ("", 0)
    deadline_s: float = 60.0
    trace_dir: Path | None = None


@dataclass
class Member:
    """A stage as the head knows it."""

    peer: str
    join: Join
    node: int = 0
    loaded: Loaded | None = None
    ready: bool = False
    report: Report | None = None


@dataclass
class StageReport:
    """What one node of a finished ring held and did (decode steps only)."""

    node: int
    segments: str
    resident_bytes: int
    peak_rss_bytes: int
    import_rss_bytes: int
    compute_ms: float
    wait_ms: float
    send_ms: float


def choose_cut(files: ModelFiles, settings: RingSettings) -> Cut:
    """The cut that the settings ask for.

    Raises:
        CutError: it does not fit the model.
    """
    if settings.cuts is not None:
        return make_cut(files.blocks, settings.cuts, private=settings.private, tail_blocks=settings.tail_blocks)
    edges = balanced_boundaries(
        files.blocks,
        settings.stages,
        head_cost=files.head_cost,
        private=settings.private,
        tail_blocks=settings.tail_blocks,
    )
    return make_cut(files.blocks, edges, private=settings.private, tail_blocks=settings.tail_blocks)


@dataclass
class RingHost:
    """One ring, from its first stage to its end. ``serve`` is the whole life; ``started`` tells when tokens may flow.

    Args:
        spawn: starts local stages once the control port is known; None waits for stages that others start.
        say: takes one line of progress.
    """

    settings: RingSettings
    spawn: Spawn | None = None
    say: Callable[[str], None] = lambda _: None
    reports: list[StageReport] = field(default_factory=list)
    cut: Cut | None = None
    files: ModelFiles | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[Head] = loop.create_future()
        self.stop = asyncio.Event()
        self._changed = asyncio.Condition()
        self._members: dict[str, Member] = {}
        self._processes: list[StageProcess] = []
        self._name = node_name("head")
        self._runner = Runner(self.settings.threads)
        self._hub: StarHub | None = None
        self._links: list[Channel] = []
        self._sink: Sink = NullTrace()
        self._meter: Meter | None = None
        self._built: Built | None = None
        self._head: Head | None = None
        self._leaving = False

    @property
    def stage_pids(self) -> list[int]:
        """Process ids of the local stages."""
        return [process.pid for process in self._processes]

    async def serve(self) -> None:
        """Form the ring, keep it, take it apart.

        Raises:
            SplitlmError: it could not be formed, or broke.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._life(group))
                group.create_task(self._stop_when_told())
        except* _Stopped:
            pass
        except* SplitlmError as errors:
            error = first_error(errors)
            if self._head is not None:
                self._head.fail(error)
            if not self.started.done():
                self.started.set_exception(error)
                self.started.exception()  # whoever waits sees it; nobody has to
            raise error from None
        finally:
            await asyncio.shield(self._leave())

    async def _stop_when_told(self) -> None:
        await self.stop.wait()
        raise _Stopped

    async def _life(self, group: asyncio.TaskGroup) -> None:
        settings = self.settings
        self.say("opening the model")
        files = self.files = await self._runner.run(self._open)
        cut = None if settings.static is not None else choose_cut(files, settings)
        data: tcp.TcpListener | None = None
        if cut is None or cut.stages > 1:
            identity = Identity(stranger(self._name), settings.token)
            listener = await tcp.listen(*settings.listen, identity, "control", expect_peer="a stage")
            self._hub = StarHub(listener)
            group.create_task(self._watch_hub(self._hub))
            if self.spawn is not None and cut is not None:
                self._processes = self.spawn(listener.port, cut.stages - 1)
                group.create_task(self._watch_processes())
            else:
                self.say(f"waiting for stages at {describe((listener.host, listener.port))}")
            cut = await self._gather(cut, files)
        self.cut = cut
        epoch = cut.epoch
        claims = claims_for(f"the head ({self._name})", files, epoch)
        self.say(f"loading {'; '.join(map(str, cut.held_by(0)))}")
        build = BuildSettings(settings.loader, settings.compute, settings.threads, settings.pace_ms)
        built = self._built = await self._runner.run(build_node, files, cut, 0, self._name, build)
        if settings.trace_dir is not None:
            self._sink = Trace(trace_path(settings.trace_dir, 0))
        self._sink.write(built.meta)
        self._meter = Meter(0, self._sink, epoch)
        inbound = outbound = None
        if self._hub is not None:
            data = await tcp.listen(
                settings.data[0] or settings.listen[0],
                settings.data[1],
                Identity(claims, settings.token),
                "data",
                expect_peer=f"node {cut.stages - 1}",
            )
            try:
                inbound, outbound = await self._link(self._hub, cut, data, Identity(claims, settings.token))
            finally:
                await data.close()
        self._head = Head(
            built.relays,
            self._runner,
            self._meter,
            outbound=outbound,
            inbound=inbound,
            context=files.context,
            prefill_chunk=settings.prefill_chunk,
            last_segment=len(cut.segments) - 1,
        )
        self.say("ready")
        self.started.set_result(self._head)
        try:
            await self._head.run()
        except PeerLostError:
            await asyncio.sleep(GRACE_S)  # the control plane may know the reason
            raise

    def _open(self) -> ModelFiles:
        return ModelFiles(self.settings.folder, family=self.settings.family, dtype=self.settings.dtype)

    async def _gather(self, cut: Cut | None, files: ModelFiles) -> Cut:
        """Wait until every place has a stage, and give the places out in the order of arrival."""
        hub = self._hub
        if hub is None:
            raise RuntimeError("no control plane")
        settings = self.settings
        if cut is not None:
            count = cut.stages - 1
            await self._until(
                lambda: len(self._members) >= count, f"{count} stages", lambda: f"{len(self._members)} came"
            )
            members = list(self._members.values())[:count]
            for peer in list(self._members)[count:]:
                await hub.send(peer, Stop("the ring is complete"))
            if any(member.join.begin is not None for member in members):
                raise CutError(
                    "A stage came with a fixed place (--layer-begin), and the head gives the places",
                    remedy="Give the head its own --layer-begin and --layer-end, or start the stage with --join",
                )
        else:
            await self._until(
                lambda: self._tiles(files.blocks),
                "stages that hold every block",
                lambda: (
                    "they hold "
                    + (", ".join(f"[{m.join.begin}, {m.join.end})" for m in self._members.values()) or "none")
                ),
            )
            members = sorted(self._members.values(), key=lambda m: m.join.begin or 0)
            edges = [m.join.begin or 0 for m in members]
            last = members[-1].join.end
            tail = files.blocks - last if last is not None and last >= 0 else 0
            cut = make_cut(files.blocks, edges, private=settings.private, tail_blocks=tail if settings.private else 0)
        for node, member in enumerate(members, start=1):
            member.node = node
            await hub.send(
                member.peer,
                Assign(
                    node=node,
                    cut=cut,
                    model=settings.model,
                    family=settings.family,
                    loader=settings.loader,
                    dtype=dtype_name(files.dtype),
                    compute=settings.compute,
                    threads=settings.threads,
                    deadline_s=settings.deadline_s,
                    pace_ms=settings.pace_ms,
                ),
            )
        return cut

    def _tiles(self, blocks: int) -> bool:
        """Whether the fixed places that came, with the head's own, leave no block out."""
        at = self.settings.static or 0
        for member in sorted(self._members.values(), key=lambda m: m.join.begin or 0):
            begin, end = member.join.begin, member.join.end
            if begin is None or end is None:
                raise CutError(
                    f"{member.join.name} came without a fixed place", remedy="Give it --layer-begin and --layer-end"
                )
            if begin != at:
                return False
            at = end if end >= 0 else blocks
        return at == blocks or (self.settings.private and bool(self._members))

    async def _link(self, hub: StarHub, cut: Cut, data: tcp.TcpListener, identity: Identity) -> tuple[Channel, Channel]:
        """Tell everyone where to send, then connect to node 1 and let the last node in."""
        settings, placed = self.settings, {m.node: m for m in self._members.values() if m.node}
        await self._until(
            lambda: all(member.loaded for member in placed.values()),
            "every stage to load its blocks",
            lambda: f"{sum(member.loaded is not None for member in placed.values())} have",
        )
        self.say("linking")
        for node, member in placed.items():
            after = placed.get(cut.next_node(node))
            host, port = self._address(hub, after, member) if after else ("", data.port)
            await hub.send(member.peer, Connect(host, port))
        first = placed[1]
        host, port = settings.send if settings.send[1] else self._address(hub, first, None)
        last = f"node {cut.stages - 1}"
        try:
            async with asyncio.TaskGroup() as group:
                dialled = group.create_task(
                    tcp.connect(host, port, identity, "data", deadline_s=settings.deadline_s, who="node 1")
                )
                answered = group.create_task(data.accept(deadline_s=settings.deadline_s, who=last))
        except* SplitlmError as errors:
            await asyncio.sleep(GRACE_S)
            raise first_error(errors) from None
        self._links = [answered.result(), dialled.result()]
        await self._until(
            lambda: all(member.ready for member in placed.values()), "every stage to link to its neighbours", lambda: ""
        )
        return answered.result(), dialled.result()

    def _address(self, hub: StarHub, member: Member, asker: Member | None) -> tuple[str, int]:
        """Where a stage's data listener is, for the node that is to send to it."""
        if member.loaded is None:
            raise RuntimeError("asked for the address of a stage that has not loaded")
        host = member.loaded.host or hub.address(member.peer)
        if asker is not None and _is_loopback(host) and not _is_loopback(hub.address(asker.peer)):
            raise NetworkError(
                f"{member.join.name} joined over {host}, where {asker.join.name} on another machine cannot reach it",
                expected="every stage to join by an address that the others can reach",
                remedy="Start it with --join and this machine's network address, or with --advertise",
            )
        return host, member.loaded.port

    async def _until(self, done: Callable[[], bool], what: str, so_far: Callable[[], str]) -> None:
        deadline = self.settings.deadline_s
        self.say(f"waiting for {what}")
        try:
            async with asyncio.timeout(deadline), self._changed:
                await self._changed.wait_for(done)
        except TimeoutError:
            seen = so_far()
            raise PeerMissingError(
                f"The head waited {deadline:g} s for {what}" + (f"; {seen}" if seen else ""),
                where=describe(self.settings.listen),
                remedy="Start the missing stages with splitlm stage --join, or raise --deadline",
            ) from None

    async def _watch_hub(self, hub: StarHub) -> None:
        while True:
            peer, event = await hub.receive()
            async with self._changed:
                await self._hear(hub, peer, event)
                self._changed.notify_all()

    async def _hear(self, hub: StarHub, peer: str, event: object) -> None:
        member = self._members.get(peer)
        match event:
            case PeerCame():
                pass
            case Join() as join if member is None:
                if self.cut is not None:
                    await hub.send(peer, Stop("the ring is complete"))
                else:
                    self._members[peer] = Member(peer, join)
            case Loaded() as loaded if member:
                member.loaded = loaded
            case Ready() if member:
                member.ready = True
            case Report() as report if member:
                member.report = report
            case Trouble(code=code, text=text) if member:
                raise reported(code, f"{self._call(member)} stopped: {text}")
            case PeerGone(reason=reason):
                if member is None or self._leaving:
                    return
                if not member.node:
                    del self._members[peer]
                else:
                    raise PeerLostError(f"{self._call(member)} is gone: {reason}".rstrip(". "))
            case other:
                await hub.drop(peer)
                if member is not None:
                    raise ProtocolError(f"{self._call(member)} sent {type(other).__name__} out of turn")

    def _call(self, member: Member) -> str:
        return f"Node {member.node} ({member.join.name})" if member.node else f"The stage {member.join.name}"

    async def _watch_processes(self) -> None:
        """A local stage that ends before it joined is noticed here, with what it said last."""
        while True:
            for process in self._processes:
                error = process.failure()
                if error is not None:
                    await asyncio.sleep(GRACE_S)  # what it told the head itself says more
                    raise error
            await asyncio.sleep(POLL_S)

    async def _leave(self) -> None:
        """Tell the stages to stop, hear their reports, and leave nothing behind."""
        self._leaving = True
        hub, members = self._hub, list(self._members.values())
        if self._head is not None:
            self._head.fail(NetworkError("The ring was closed"))
        if hub is not None:
            for member in members:
                with contextlib.suppress(NetworkError):
                    await hub.send(member.peer, Stop())
            with contextlib.suppress(NetworkError, TimeoutError):
                await asyncio.wait_for(self._hear_reports(hub, members), REPORT_S)
            await _quietly([link.close() for link in self._links])
            await hub.close()
        await asyncio.to_thread(end_all, self._processes)
        self._runner.close()
        if self._meter is not None and self._built is not None:
            self._sink.write(self._meter.final(self._built.meta.import_rss_mb))
            self._collect(self._meter, self._built)
        await asyncio.to_thread(self._sink.close)

    async def _hear_reports(self, hub: StarHub, members: Sequence[Member]) -> None:
        gone: set[str] = set()
        while any(m.report is None and m.peer not in gone for m in members if m.node):
            peer, event = await hub.receive()
            if isinstance(event, PeerGone):
                gone.add(peer)
            elif isinstance(event, Report) and peer in self._members:
                self._members[peer].report = event

    def _collect(self, meter: Meter, built: Built) -> None:
        if self.cut is None:
            return
        sums = meter.decode
        own = StageReport(
            0,
            built.meta.segments,
            built.meta.resident_bytes,
            peak_rss_bytes(),
            int(built.meta.import_rss_mb * MIB),
            sums.compute_ms,
            sums.recv_wait_ms,
            sums.send_ms,
        )
        self.reports = [own]
        for member in sorted(self._members.values(), key=lambda m: m.node):
            if member.node and (r := member.report):
                segments = "; ".join(map(str, self.cut.held_by(member.node)))
                self.reports.append(
                    StageReport(
                        member.node, segments, r.resident_bytes, r.peak_rss_bytes, r.import_rss_bytes,
                        r.compute_ms, r.wait_ms, r.send_ms,
                    )
                )  # fmt: skip


class _Stopped(Exception):
    """The owner of the ring wants it to end."""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _quietly(closing: Sequence[Awaitable[None]]) -> None:
    await asyncio.gather(*closing, return_exceptions=True)
