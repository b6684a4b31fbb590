"""The stage's side: find the head, take a place in the cut, link to the neighbours, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial

from splitlm.bus.base import Spoke
from splitlm.bus.line import BEATS
from splitlm.bus.star import StarSpoke
from splitlm.core.cut import Cut
from splitlm.core.engines import ENGINES
from splitlm.core.errors import CutError, NetworkError, PeerLostError, PeerRefusedError, ProtocolError, SplitlmError
from splitlm.core.errors import from_exit_code as reported
from splitlm.core.groups import fault, first_error
from splitlm.core.messages import (
    Abort,
    Announce,
    Assign,
    Commit,
    Connect,
    Finish,
    Join,
    Loaded,
    Message,
    Prepare,
    Ready,
    Report,
    Stop,
    Trouble,
    trouble,
)
from splitlm.infer.meter import Meter
from splitlm.link import tcp
from splitlm.link.address import describe
from splitlm.migrate.mover import Mover
from splitlm.model.load import ModelFiles
from splitlm.model.runner import Runner
from splitlm.node.build import BuildSettings, Built, build_node
from splitlm.node.ending import leave
from splitlm.node.follower import Follower
from splitlm.node.identity import claims_for, node_name, stranger, watch_parent
from splitlm.node.links import Links, link_stage
from splitlm.node.serve import serve
from splitlm.node.settings import StageSettings, silence
from splitlm.node.work import StageWork
from splitlm.telemetry.memory import peak_rss_bytes
from splitlm.telemetry.sinks import NullTrace, Sink, Trace, trace_path
from splitlm.wire import tls
from splitlm.wire.channel import Channel, Listener
from splitlm.wire.handshake import Identity

GRACE_S = 1.0
"""How long a stage whose neighbour went away waits for the head's word that the ring is over."""
LAST_WORDS_S = 1.0
RUNNER_S = 5.0
"""How long a leaving stage waits for the step or the load at hand."""
MIB = 2**20


async def run_stage(settings: StageSettings) -> None:
    """Be one stage of a ring, from joining to the head's Stop.

    Raises:
        PeerMissingError: the head or a neighbour did not come in time.
        PeerLostError: the head or a neighbour went away.
        PeerRefusedError: a neighbour runs another version or model, or has another token or authority.
        UsageError: this node's certificate is no good.
        ModelError: the model cannot be loaded here. The head is told first.
    """
    name = node_name("stage")
    security = tls.load(settings.tls) if settings.tls else None
    outward = security.dialling if security else None
    identity = Identity(stranger(name), settings.token)
    settings.say(f"joining the head at {describe(settings.head)}")
    try:
        async with asyncio.TaskGroup() as group:
            orphaned = group.create_task(watch_parent(settings.parent)) if settings.parent else None
            wait = settings.deadline_s
            channel = await tcp.connect(
                *settings.head, identity, "control", deadline_s=wait, who="the head", tls=outward
            )
            if orphaned is not None:
                orphaned.cancel()  # from here on the channel ends with the head
            lost_s = silence(settings.ctrl_timeout_s)
            spoke = StarSpoke(channel, heartbeat_s=lost_s / BEATS, timeout_s=lost_s)
            try:
                await _Member(settings, spoke, name, channel.local_host, security).run()
            finally:
                await spoke.close()
    except* SplitlmError as errors:
        raise first_error(errors) from None


class _Member:
    """One stage while it is part of a ring."""

    def __init__(
        self, settings: StageSettings, spoke: Spoke, name: str, local_host: str, security: tls.Security | None
    ) -> None:
        self._settings, self._spoke, self._name, self._local_host = settings, spoke, name, local_host
        self._security = security
        loop = asyncio.get_running_loop()
        self._assign: asyncio.Future[Assign] = loop.create_future()
        self._connect: asyncio.Future[Connect] = loop.create_future()
        self._runner = Runner(settings.threads)
        self._sink: Sink = NullTrace()
        self._meter: Meter | None = None
        self._built: Built | None = None
        self._links: list[Channel | Listener] = []
        self._stopped = asyncio.Event()
        self._heard_out = asyncio.Event()
        self._loader = Runner(background=True)
        self._follower: Follower | None = None
        self._moves: StageWork | None = None
        self._cut: Cut | None = None

    async def run(self) -> None:
        """Join, serve, leave; see ``run_stage``."""
        try:
            await self._take_part()
        except SplitlmError as error:
            await self._tell(trouble(error))
            raise
        except ExceptionGroup as faults:
            told = fault(faults)
            await self._tell(trouble(told))
            if isinstance(told, NetworkError):
                raise told from None
            raise
        except asyncio.CancelledError:
            await self._tell(trouble(NetworkError("It was stopped on its own machine")))
            raise
        finally:
            await leave(
                partial(asyncio.to_thread, self._runner.close, RUNNER_S),
                partial(asyncio.to_thread, self._loader.close, RUNNER_S),
                partial(asyncio.to_thread, self._finish_trace),
            )
        await self._tell(self._report())

    async def _tell(self, message: Message) -> None:
        """Last words: whether they arrive is not this stage's concern any more."""
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await self._spoke.send(message)

    async def _take_part(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._work())
                group.create_task(self._listen(work))
        except* SplitlmError as errors:
            # A neighbour that heard Stop a moment earlier took its links along: its loss can come with our own Stop.
            if not self._stopped.is_set():
                raise first_error(errors) from None

    async def _listen(self, work: asyncio.Task[None]) -> None:
        """Hear the head until it says Stop."""
        while True:
            try:
                message = await self._spoke.receive()
            except PeerLostError as error:
                self._heard_out.set()
                raise self._standing(error) from None
            match message:
                case Assign() as assign if not self._assign.done():
                    self._assign.set_result(assign)
                case Connect() as connect if not self._connect.done():
                    self._connect.set_result(connect)
                case Stop():
                    self._stopped.set()
                    self._heard_out.set()
                    work.cancel()
                    return
                case Announce() | Prepare() | Commit() | Abort() | Finish() as word if self._follower is not None:
                    self._follower.hear(word)
                case Trouble(code=code, text=text):
                    raise reported(code, f"The head gave up: {text}")
                case other:
                    raise ProtocolError(
                        f"A {type(other).__name__} message came from the head", expected="Assign, Connect or Stop"
                    )

    @property
    def _node(self) -> int:
        return self._assign.result().node

    async def _work(self) -> None:
        place = self._settings.place
        await self._spoke.send(Join(self._name, place.begin if place else None, place.end if place else None))
        assign = await self._assign
        self._check(assign.cut, assign.node)
        self._settings.say(f"stage {assign.node}: loading {'; '.join(map(str, assign.cut.held_by(assign.node)))}")
        identity, built, files = await self._runner.run(self._build, assign)
        self._built = built
        if self._settings.trace_dir is not None:
            self._sink = Trace(trace_path(self._settings.trace_dir, assign.node))
        self._sink.write(built.meta)
        self._meter = Meter(assign.node, self._sink, assign.cut.epoch)
        try:
            links = await self._link(assign, identity, built)
            mover = Mover(assign.node, built.stages[0], files, assign.cut, links.movers, self._runner, self._loader)
            work = self._moves = StageWork(assign.node, mover, built.relays, self._meter, self._changed)
            self._follower = Follower(
                self._spoke.send,
                work,
                node=assign.node,
                epoch=assign.cut.epoch,
                ctrl_timeout_s=assign.barrier_s,
                record=self._sink.write,
                measure=self._meter.window_ms,
            )
            await self._spoke.send(Ready())
            self._settings.say(f"stage {assign.node}: ready")
            async with asyncio.TaskGroup() as group:
                group.create_task(mover.run())
                group.create_task(self._follower.run())
                group.create_task(serve(self._runner, built.relays[0], links.inbound, links.outbound, self._meter))
        except* PeerLostError as errors:
            # For the head's word on it. A killed head ends all lines at once, and then there is none to wait for: the
            # cancellation that tells of it may be lost on a group that is ending already.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._heard_out.wait(), GRACE_S)
            raise self._standing(first_error(errors)) from None
        finally:
            await leave(self._close_links)

    async def _close_links(self) -> None:
        await asyncio.gather(*(link.close() for link in self._links))

    async def _link(self, assign: Assign, identity: Identity, built: Built) -> Links:
        settings, place = self._settings, self._settings.place
        listen = place.listen if place else settings.listen

        async def opened(data_port: int, move_port: int) -> None:
            meta = built.meta
            await self._spoke.send(
                Loaded(
                    settings.advertise,
                    data_port,
                    meta.parameters,
                    meta.resident_bytes,
                    move_port,
                    meta.compute,
                    built.note,
                )
            )

        async def told() -> Connect:
            word = await self._connect
            return Connect(word.host or self._spoke.hub_host, word.port, word.move_port)

        return await link_stage(
            assign,
            identity,
            listen=(listen[0] or self._local_host, listen[1]),
            send=place.send if place else None,
            deadline_s=settings.deadline_s,
            tls=self._security,
            opened=opened,
            told=told,
            keep=self._links.append,
        )

    def _standing(self, error: SplitlmError) -> SplitlmError:
        """The loss of a peer, with what this stage was doing: in a barrier that decides what may go on."""
        follower = self._follower
        if follower is None or not isinstance(error, PeerLostError):
            return error
        return PeerLostError(f"{error.what.rstrip('. ')}; {follower.standing}", where=error.where, remedy=error.remedy)

    def _build(self, assign: Assign) -> tuple[Identity, Built, ModelFiles]:
        """Load this stage's segments, and read what it is to claim of its model. Runs on the compute thread."""
        folder = self._settings.resolve(self._settings.model or assign.model)
        files = ModelFiles(folder, family=assign.family, dtype=assign.dtype)
        if assign.config and (ours := files.index.config_hash()) != assign.config:
            raise PeerRefusedError(
                f"The model config hash differs: the head has {assign.config!r}, {self._name} has {ours!r}",
                where=str(folder),
                expected="the model that the head runs",
                remedy="Start the stage with that model",
            )
        if assign.compute not in ENGINES:
            raise PeerRefusedError(
                f"The head asks for the engine {assign.compute!r}, which this build of splitlm does not have",
                where=self._name,
                expected=" or ".join(ENGINES),
                remedy="Install the head's version of splitlm here, or choose another --compute there",
            )
        settings = BuildSettings(
            "hf" if assign.loader == "hf" else "shard",
            assign.compute,
            self._settings.threads or assign.threads,
            assign.pace_ms,
        )
        built = build_node(files, assign.cut, assign.node, self._name, settings)
        name = f"stage {assign.node} ({self._name})"
        claims = claims_for(name, files, ring=assign.ring, place=assign.node, epoch=assign.cut.epoch)
        return Identity(claims, self._settings.token), built, files

    def _check(self, cut: Cut, node: int) -> None:
        if not 0 < node < cut.stages:
            raise ProtocolError(f"The head assigned node {node} of {cut.stages}", expected="a node after the head")
        place = self._settings.place
        held = cut.held_by(node)[0]
        last = node == cut.stages - 1
        if place and (held.begin != place.begin or (held.end != place.end and not (place.end < 0 and last))):
            raise CutError(f"The head's cut gives this stage {held}", expected=f"blocks [{place.begin}, {place.end})")

    def _changed(self, cut: Cut) -> None:
        self._settings.say(f"{'; '.join(map(str, cut.held_by(self._node)))} from epoch {cut.epoch} on")

    def _finish_trace(self) -> None:
        if self._moves is not None:
            self._moves.flush()
        if self._meter is not None and self._built is not None:
            self._sink.write(self._meter.final(self._built.meta.import_rss_mb))
        self._sink.close()

    def _report(self) -> Report:
        meter, built = self._meter, self._built
        return Report(
            peak_rss_bytes=peak_rss_bytes(),
            import_rss_bytes=int(built.meta.import_rss_mb * MIB) if built else 0,
            resident_bytes=built.meta.resident_bytes if built else 0,
            compute_ms=meter.decode.compute_ms if meter else 0.0,
            wait_ms=meter.decode.recv_wait_ms if meter else 0.0,
            send_ms=meter.decode.send_ms if meter else 0.0,
            moves=self._moves.told() if self._moves else [],
        )
