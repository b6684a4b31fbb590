"""The head's side: form a ring, keep it until it is closed or breaks, and leave nothing behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from splitlm.bus.line import BEATS
from splitlm.bus.star import StarHub
from splitlm.core import messages
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, PeerLostError, SplitlmError
from splitlm.core.groups import fault, first_error
from splitlm.core.shifts import check_shifts
from splitlm.infer.head import Head
from splitlm.infer.meter import Meter
from splitlm.link import tcp
from splitlm.link.address import describe
from splitlm.migrate.mover import Mover
from splitlm.model.load import ModelFiles
from splitlm.model.payload import dtype_name
from splitlm.model.runner import Runner
from splitlm.node.build import BuildSettings, Built, build_node, engines_in_words
from splitlm.node.ending import leave
from splitlm.node.identity import claims_for, node_name, process_of, stranger
from splitlm.node.lead import Lead, plan_of
from splitlm.node.links import link_head
from splitlm.node.members import Members
from splitlm.node.processes import HURRY_S, StageProcess, end_all
from splitlm.node.settings import RingSettings, StageReport, choose_cut, silence
from splitlm.node.window import Boundary, Plan
from splitlm.telemetry.record import Migration
from splitlm.telemetry.sinks import NullTrace, Sink, Trace, trace_path
from splitlm.wire import tls
from splitlm.wire.channel import Channel
from splitlm.wire.handshake import Claims, Identity

GRACE_S = 1.0
"""How long the loss of a link waits for the control plane, which may know the reason."""
REPORT_S = 3.0
"""How long a stage that was told to stop may take to answer."""
POLL_S = 0.2
REAP_S = 0.02
MIB = 2**20

T = TypeVar("T")
Spawn = Callable[[int, int], list[StageProcess]]
"""``spawn(port, count)`` starts so many stage processes that join the head at this port."""


class _StoppedError(Exception):
    """The owner of the ring wants it to end."""


@dataclass
class RingHost:
    """One ring, from its first stage to its end. ``serve`` is its whole life; ``started`` tells when tokens may flow.

    Args:
        spawn: starts local stages once the control port is known; None waits for stages that others start.
        say: takes one line of progress.

    Attributes:
        reports: what each node held and did, once ``serve`` has ended.
        broken: why it broke, from the moment at which that is known.
    """

    settings: RingSettings
    spawn: Spawn | None = None
    say: Callable[[str], None] = lambda _: None
    reports: list[StageReport] = field(default_factory=list)
    cut: Cut | None = None
    files: ModelFiles | None = None
    broken: SplitlmError | None = None

    def __post_init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.started: asyncio.Future[Head] = loop.create_future()
        self.stop = asyncio.Event()
        self._processes: list[StageProcess] = []
        self._name = node_name("head")
        self._ring = secrets.token_hex(8)
        self._tls = tls.load(self.settings.tls) if self.settings.tls else None
        self._runner = Runner(self.settings.threads)
        self._hub: StarHub | None = None
        self._members: Members | None = None
        self._links: list[Channel] = []
        self._sink: Sink = NullTrace()
        self._meter: Meter | None = None
        self._built: Built | None = None
        self._head: Head | None = None
        self._loader = Runner(background=True)
        self._lead_of: Lead | None = None

    @property
    def stage_pids(self) -> list[int]:
        """Process ids of the local stages."""
        return [process.pid for process in self._processes]

    async def serve(self) -> None:
        """Form the ring, keep it, take it apart.

        Raises:
            SplitlmError: it could not be formed, or broke.
        """
        ended: SplitlmError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._live(group))
                group.create_task(self._stop_when_told())
        except* _StoppedError:
            pass
        except* SplitlmError as errors:
            ended = first_error(errors)
            raise ended from None
        except* Exception as faults:
            ended = fault(faults)
            if isinstance(ended, NetworkError):
                raise ended from None
            raise
        finally:
            self.broken = ended
            told = ended or NetworkError("The ring was closed")
            if self._head is not None:
                self._head.fail(told)
            try:
                await leave(partial(self._leave, ended))
            finally:
                if not self.started.done():
                    self.started.set_exception(told)
                    self.started.exception()  # whoever waits sees it; nobody has to

    def kill(self) -> None:
        """End the local stages at once. From any thread, when there is no time for ``serve`` to end in order."""
        for process in self._processes:
            process.end()

    async def _stop_when_told(self) -> None:
        await self.stop.wait()
        raise _StoppedError

    async def _live(self, group: asyncio.TaskGroup) -> None:
        settings = self.settings
        self.say("opening the model")
        files = self.files = await self._runner.run(self._open)
        cut = None if settings.static is not None else choose_cut(files, settings)
        if cut is not None:
            check_shifts(cut, settings.shifts)
        if cut is None or cut.stages > 1:
            cut = await self._gather(group, cut, files)
        self.cut = cut
        self.say(f"loading {'; '.join(map(str, cut.held_by(0)))}")
        build = BuildSettings(settings.loader, settings.compute_of(0), settings.threads, settings.pace_of(0))
        self._built = built = await self._runner.run(build_node, files, cut, 0, self._name, build)
        if settings.trace_dir is not None:
            self._sink = Trace(trace_path(settings.trace_dir, 0))
        self._sink.write(built.meta)
        self._meter = Meter(0, self._sink, cut.epoch)
        inbound = outbound = None
        movers: dict[int, Channel] = {}
        if self._members is not None:
            claims = await self._runner.run(self._claims, files, cut)
            identity = Identity(claims, settings.token)
            linked = link_head(self._members, settings, cut, identity, self._tls, self.say, self._links.append)
            links = await self._patiently(linked)
            inbound, outbound, movers = links.inbound, links.outbound, links.movers
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
        if self._members is not None and settings.window:
            mover = Mover(0, built.stages[0], files, cut, movers, self._runner, self._loader)
            plan = await self._runner.run(plan_of, settings, files, cut, self._head)
            lead = self._lead(self._head, self._meter, built, mover, self._members, plan)
            for part in lead.parts:
                group.create_task(self._patiently(part))
        others = self._members.engines if self._members is not None else {}
        for line in engines_in_words({0: (built.meta.compute, built.note), **others}):
            self.say(line)
        self.say("ready")
        self.started.set_result(self._head)
        await self._patiently(self._head.run())

    @property
    def engines(self) -> list[str]:
        """The engine that each node runs, in their order; empty until all are linked."""
        if self._built is None:
            return []
        found = {0: self._built.meta.compute}
        for member in self._members.placed if self._members is not None else ():
            if member.loaded is not None:
                found[member.node] = member.loaded.compute
        return [found[node] for node in sorted(found)]

    def _lead(self, head: Head, meter: Meter, built: Built, mover: Mover, members: Members, plan: Plan) -> Lead:
        settings = self.settings
        lead = self._lead_of = Lead(
            head,
            mover,
            built.relays,
            meter,
            members.send,
            plan,
            window=settings.window,
            ctrl_timeout_s=settings.ctrl_timeout_s,
            changed=self._changed,
        )
        return lead

    @property
    def boundaries(self) -> list[Boundary]:
        """What happened between windows."""
        return list(self._lead_of.windows.boundaries) if self._lead_of else []

    @property
    def migrations(self) -> list[Migration]:
        """Every side of every move; of other nodes once ``serve`` has ended, and their newest ones."""
        own = list(self._lead_of.work.done) if self._lead_of else []
        reports = [member.report for member in self._members.placed if member.report] if self._members else []
        others = [Migration(**msgspec.structs.asdict(side)) for report in reports for side in report.moves]
        return sorted([*own, *others], key=lambda side: (side.epoch, side.role, side.node))

    def _heard(self, node: int, message: messages.Any) -> None:
        if self._lead_of is not None:
            self._lead_of.heard(node, message)

    def _lost(self, node: int, reason: str) -> str:
        return self._lead_of.lost(node, reason) if self._lead_of is not None else ""

    def _changed(self, cut: Cut) -> None:
        self.cut = cut

    def _open(self) -> ModelFiles:
        return ModelFiles(self.settings.folder, family=self.settings.family, dtype=self.settings.dtype)

    def _claims(self, files: ModelFiles, cut: Cut) -> Claims:
        return claims_for(f"the head ({self._name})", files, ring=self._ring, place=0, epoch=cut.epoch)

    async def _gather(self, group: asyncio.TaskGroup, cut: Cut | None, files: ModelFiles) -> Cut:
        """Open the control plane, start or await the stages, and tell each its place."""
        settings = self.settings
        identity = Identity(stranger(self._name), settings.token)
        inward = self._tls.listening if self._tls else None
        listener = await tcp.listen(*settings.listen, identity, "control", expect_peer="a stage", tls=inward)
        lost_s = silence(settings.ctrl_timeout_s)
        self._hub = StarHub(listener, heartbeat_s=lost_s / BEATS, timeout_s=lost_s)
        members = self._members = Members(self._hub, settings, self.say, self._fate, self._heard, self._lost)
        group.create_task(members.watch())
        if self.spawn is not None and cut is not None:
            self._processes = self.spawn(listener.port, cut.stages - 1)
            group.create_task(self._watch_processes())
        else:
            self.say(f"stages can join at {describe((listener.host, listener.port))}")
        cut = await members.gather(cut, files.blocks)
        check_shifts(cut, settings.shifts)
        await members.assign(cut, dtype_name(files.dtype), self._ring, files.index.config_hash())
        return cut

    async def _patiently(self, work: Awaitable[T]) -> T:
        """Do this; where a neighbour's loss ends it, first hear whether the control plane knows the reason."""
        try:
            return await work
        except PeerLostError:
            await asyncio.sleep(GRACE_S)
            raise

    async def _watch_processes(self) -> None:
        """A local stage that ends before it could tell the head why is noticed here, with what it said last."""
        while True:
            for process in self._processes:
                error = process.failure()
                if error is not None:
                    await asyncio.sleep(GRACE_S)
                    raise error
            await asyncio.sleep(POLL_S)

    async def _fate(self, name: str) -> str:
        """How the process of a lost stage ended, where it is one of ours and did end."""
        for process in self._processes:
            if process.pid == process_of(name):
                for _ in range(int(GRACE_S / REAP_S)):  # its sockets close a moment before it can be reaped
                    if fate := process.fate():
                        return fate
                    await asyncio.sleep(REAP_S)
        return ""

    async def _leave(self, ended: SplitlmError | None) -> None:
        """Tell the stages to stop, or why the head gives up, hear their reports, and leave nothing behind."""
        async with AsyncExitStack() as stack:  # from last to first, and each whatever became of the one before
            stack.push_async_callback(asyncio.to_thread, self._sink.close)
            stack.push_async_callback(self._finish_trace)
            stack.push_async_callback(asyncio.to_thread, self._runner.close)
            stack.push_async_callback(asyncio.to_thread, self._loader.close)
            if self._hub is not None:
                stack.push_async_callback(self._hub.close)
            stack.push_async_callback(self._close_links)
            # Before the links: a stage that hangs keeps them open until it is ended.
            stack.push_async_callback(asyncio.to_thread, end_all, self._processes)
            if self._members is not None:
                answered = await self._members.dismiss(REPORT_S, ended)
                pids = {process_of(name) for name in answered}
                silent = [process for process in self._processes if process.pid not in pids]
                await asyncio.to_thread(end_all, silent, HURRY_S)

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links), return_exceptions=True)

    async def _finish_trace(self) -> None:
        if self._lead_of is not None:
            self._lead_of.work.flush()
        if self._meter is not None and self._built is not None:
            self._sink.write(self._meter.final(self._built.meta.import_rss_mb))
            self._collect(self._meter, self._built)

    def _collect(self, meter: Meter, built: Built) -> None:
        self.reports = [built.report(meter)]
        for member in self._members.placed if self._members else ():
            if (told := member.report) is not None and self.cut is not None:
                self.reports.append(
                    StageReport(
                        node=member.node,
                        segments="; ".join(map(str, self.cut.held_by(member.node))),
                        resident_bytes=told.resident_bytes,
                        peak_rss_bytes=told.peak_rss_bytes,
                        import_rss_bytes=told.import_rss_bytes,
                        compute_ms=told.compute_ms,
                        wait_ms=told.wait_ms,
                        send_ms=told.send_ms,
                    )
                )
