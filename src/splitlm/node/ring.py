"""The head's side: form a ring, keep it until it is closed or breaks, and leave nothing behind."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from splitlm.bus.line import BEATS
from splitlm.bus.star import StarHub
from splitlm.coordinator.coordinator import Coordinator
from splitlm.core import messages
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, PeerLostError, SplitlmError
from splitlm.core.groups import fault, first_error
from splitlm.infer.head import Head
from splitlm.infer.meter import Meter
from splitlm.link import tcp
from splitlm.link.address import describe
from splitlm.migrate.mover import Mover
from splitlm.model.load import ModelFiles
from splitlm.model.payload import dtype_name
from splitlm.model.runner import Runner
from splitlm.node.build import BuildSettings, Built, build_node
from splitlm.node.follower import Follower
from splitlm.node.identity import check_place, claims_for, node_name, process_of, stranger
from splitlm.node.members import Members
from splitlm.node.processes import StageProcess, end_all
from splitlm.node.settings import RingSettings, StageReport, choose_cut
from splitlm.node.window import ForcedShifts, Noop, Windows
from splitlm.node.work import StageWork
from splitlm.telemetry.memory import peak_rss_bytes
from splitlm.telemetry.sinks import NullTrace, Sink, Trace, trace_path
from splitlm.wire.channel import Channel
from splitlm.wire.handshake import Claims, Identity

GRACE_S = 1.0
"""How long the loss of a link waits for the control plane, which may know the reason."""
REPORT_S = 3.0
"""How long a stage that was told to stop may take to answer."""
HURRY_S = 0.5
"""Grace of a local stage that did not answer."""
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
        self._runner = Runner(self.settings.threads)
        self._hub: StarHub | None = None
        self._members: Members | None = None
        self._links: list[Channel] = []
        self._sink: Sink = NullTrace()
        self._meter: Meter | None = None
        self._built: Built | None = None
        self._head: Head | None = None
        self._loader = Runner(background=True)
        self._coordinator: Coordinator | None = None
        self._follower: Follower | None = None
        self.windows: Windows | None = None

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
            raise
        finally:
            self.broken = ended
            told = ended or NetworkError("The ring was closed")
            if self._head is not None:
                self._head.fail(told)
            try:
                await asyncio.shield(self._leave(ended))
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
        if cut is None or cut.stages > 1:
            cut = await self._gather(group, cut, files)
        self.cut = cut
        self.say(f"loading {'; '.join(map(str, cut.held_by(0)))}")
        build = BuildSettings(settings.loader, settings.compute, settings.threads, settings.pace_ms)
        self._built = built = await self._runner.run(build_node, files, cut, 0, self._name, build)
        if settings.trace_dir is not None:
            self._sink = Trace(trace_path(settings.trace_dir, 0))
        self._sink.write(built.meta)
        self._meter = Meter(0, self._sink, cut.epoch)
        inbound = outbound = None
        if self._members is not None:
            claims = await self._runner.run(self._claims, files, cut)
            inbound, outbound = await self._link(self._members, cut, Identity(claims, settings.token))
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
            mover = Mover(0, built.stages[0], files, cut, {1: self._links[-1]}, self._runner, self._loader)
            self._lead(group, cut, mover, built, self._members)
        self.say("ready")
        self.started.set_result(self._head)
        await self._patiently(self._head.run())

    def _lead(self, group: asyncio.TaskGroup, cut: Cut, mover: Mover, built: Built, members: Members) -> None:
        """Lead barriers between windows; this node's own stage follows like any other."""
        settings, meter, head = self.settings, self._meter, self._head
        if meter is None or head is None:
            raise RuntimeError("windows need a head")
        work = StageWork(0, mover, built.relays, meter, self._changed)
        timeout = settings.barrier_s

        async def say(message: messages.Message) -> None:
            self._heard(0, cast(messages.Any, message))

        follower = self._follower = Follower(say, work, epoch=cut.epoch, ctrl_timeout_s=timeout)

        async def send(node: int, message: messages.Message) -> None:
            if node == 0:
                follower.hear(cast(messages.Any, message))
            else:
                await members.send(node, message)

        self._coordinator = Coordinator(send, range(cut.stages), cut=cut, ctrl_timeout_s=timeout)
        plan = ForcedShifts(settings.shifts, settings.window) if settings.shifts else Noop()
        self.windows = Windows(head, self._coordinator, plan, settings.window, self._sink)
        for work_of in (mover.run(), follower.run(), self.windows.run()):
            group.create_task(self._patiently(work_of))

    def _heard(self, node: int, message: messages.Any) -> None:
        if self._coordinator is not None:
            self._coordinator.hear(node, message)

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
        listener = await tcp.listen(*settings.listen, identity, "control", expect_peer="a stage")
        silence = settings.ctrl_timeout_s
        self._hub = StarHub(listener, heartbeat_s=silence / BEATS, timeout_s=silence)
        members = self._members = Members(self._hub, settings, self.say, self._fate, self._heard)
        group.create_task(members.watch())
        if self.spawn is not None and cut is not None:
            self._processes = self.spawn(listener.port, cut.stages - 1)
            group.create_task(self._watch_processes())
        else:
            self.say(f"stages can join at {describe((listener.host, listener.port))}")
        cut = await members.gather(cut, files.blocks)
        await members.assign(cut, dtype_name(files.dtype), self._ring)
        return cut

    async def _link(self, members: Members, cut: Cut, identity: Identity) -> tuple[Channel, Channel]:
        """Once everyone has loaded: tell each where to send, connect to node 1, let the last node in."""
        settings = self.settings
        last = f"node {cut.stages - 1}"
        data = await tcp.listen(
            settings.data[0] or settings.listen[0], settings.data[1], identity, "data", expect_peer=last
        )
        try:
            await members.all_loaded()
            self.say("linking")
            await members.introduce(data.port)
            host, port = settings.send if settings.send[1] else members.address(members.placed[0])

            async def dial() -> Channel:
                return self._keep(
                    await tcp.connect(host, port, identity, "data", deadline_s=settings.deadline_s, who="node 1"), 1
                )

            async def answer() -> Channel:
                return self._keep(await data.accept(deadline_s=settings.deadline_s, who=last), cut.stages - 1)

            inbound, outbound = await self._patiently(_both(answer, dial))
            first = members.placed[0].loaded
            move = await tcp.connect(
                host, first.move_port if first else 0, identity, "move", deadline_s=settings.deadline_s, who="node 1"
            )
            self._keep(move, 1)
            await members.all_ready()
        finally:
            await data.close()
        return inbound, outbound

    def _keep(self, link: Channel, place: int) -> Channel:
        """A link that was made: it is closed with the ring, and its other end must be this node."""
        self._links.append(link)
        check_place(link, place)
        return link

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
        if self._meter is not None and self._built is not None:
            self._sink.write(self._meter.final(self._built.meta.import_rss_mb))
            self._collect(self._meter, self._built)

    def _collect(self, meter: Meter, built: Built) -> None:
        sums, meta = meter.decode, built.meta
        self.reports = [
            StageReport(
                node=0,
                segments=meta.segments,
                resident_bytes=meta.resident_bytes,
                peak_rss_bytes=peak_rss_bytes(),
                import_rss_bytes=int(meta.import_rss_mb * MIB),
                compute_ms=sums.compute_ms,
                wait_ms=sums.recv_wait_ms,
                send_ms=sums.send_ms,
            )
        ]
        for member in self._members.placed if self._members else ():
            if member.report is not None and self.cut is not None:
                segments = "; ".join(map(str, self.cut.held_by(member.node)))
                self.reports.append(
                    StageReport(node=member.node, segments=segments, **msgspec.structs.asdict(member.report))
                )


async def _both(
    first: Callable[[], Coroutine[Any, Any, T]], second: Callable[[], Coroutine[Any, Any, T]]
) -> tuple[T, T]:
    """Two things at once; if one fails, the other is given up."""
    try:
        async with asyncio.TaskGroup() as group:
            one, two = group.create_task(first()), group.create_task(second())
    except* SplitlmError as errors:
        raise first_error(errors) from None
    return one.result(), two.result()
