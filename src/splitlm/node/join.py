"""The stage's side: find the head, take a place in the cut, link to the neighbours, serve until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from splitlm.bus.base import Spoke
from splitlm.bus.line import BEATS, TIMEOUT_S
from splitlm.bus.star import StarSpoke
from splitlm.core.cut import Cut
from splitlm.core.errors import CutError, NetworkError, PeerLostError, ProtocolError, SplitlmError
from splitlm.core.errors import from_exit_code as reported
from splitlm.core.groups import fault, first_error
from splitlm.core.messages import Assign, Connect, Join, Loaded, Message, Ready, Report, Stop, Trouble, trouble
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.link import tcp
from splitlm.link.address import describe
from splitlm.model.load import ModelFiles
from splitlm.model.runner import Runner
from splitlm.node.build import BuildSettings, Built, build_node
from splitlm.node.identity import check_place, claims_for, node_name, stranger
from splitlm.telemetry.memory import peak_rss_bytes
from splitlm.telemetry.sinks import NullTrace, Sink, Trace, trace_path
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Hidden
from splitlm.wire.handshake import Identity

GRACE_S = 1.0
"""How long a stage whose neighbour went away waits for the head's word that the ring is over."""
PARENT_POLL_S = 0.5
LAST_WORDS_S = 1.0
RUNNER_S = 5.0
"""How long a leaving stage waits for the step or the load at hand."""
MIB = 2**20


@dataclass(frozen=True)
class Place:
    """A place that the user fixed: blocks ``[begin, end)``, the own data address, and the next node's."""

    begin: int
    end: int
    listen: tuple[str, int]
    send: tuple[str, int]


@dataclass(frozen=True)
class StageSettings:
    """What a stage is told by its user; the rest it learns from the head.

    Attributes:
        head: address of the head's control port.
        resolve: finds a model's folder by the name that the head (or the user) gives.
        model: own name of the model, where the head's means nothing on this machine.
        token: join secret.
        deadline_s: how long to wait for the head, and for neighbours.
        ctrl_timeout_s: silence of the head after which it counts as lost.
        parent: the process that started this one for its own ring, which has no use without it; 0 for none.
        listen: address for the data listener; an empty host means the one that faces the head.
        advertise: host that the previous node can reach, where it is not the one the head sees.
        threads: intra-op threads; 0 takes the head's word.
        place: a fixed place.
        trace_dir: where records go; None turns them off.
        say: takes one line of progress.
    """

    head: tuple[str, int]
    resolve: Callable[[str], Path]
    model: str = ""
    token: str = ""
    deadline_s: float = 60.0
    ctrl_timeout_s: float = TIMEOUT_S
    parent: int = 0
    listen: tuple[str, int] = ("", 0)
    advertise: str = ""
    threads: int = 0
    place: Place | None = None
    trace_dir: Path | None = None
    say: Callable[[str], None] = lambda _: None


async def run_stage(settings: StageSettings) -> None:
    """Be one stage of a ring, from joining to the head's Stop.

    Raises:
        PeerMissingError: the head or a neighbour did not come in time.
        PeerLostError: the head or a neighbour went away.
        PeerRefusedError: a neighbour runs another version or model, or has another token.
        ModelError: the model cannot be loaded here. The head is told first.
    """
    name = node_name("stage")
    host, port = settings.head
    identity = Identity(stranger(name), settings.token)
    settings.say(f"joining the head at {describe(settings.head)}")
    try:
        async with asyncio.TaskGroup() as group:
            orphaned = group.create_task(_watch_parent(settings.parent)) if settings.parent else None
            channel = await tcp.connect(host, port, identity, "control", deadline_s=settings.deadline_s, who="the head")
            silence = settings.ctrl_timeout_s
            spoke = StarSpoke(channel, heartbeat_s=silence / BEATS, timeout_s=silence)
            try:
                await _Member(settings, spoke, name, channel.local_host).run()
            finally:
                await spoke.close()
            if orphaned is not None:
                orphaned.cancel()
    except* SplitlmError as errors:
        raise first_error(errors) from None


async def _watch_parent(parent: int) -> None:
    """Where the head was killed before this stage could join it, nothing would tell it so but the deadline."""
    while os.getppid() == parent:
        await asyncio.sleep(PARENT_POLL_S)
    raise PeerLostError(f"The head's process {parent} ended, which had started this stage")


class _Member:
    """One stage while it is part of a ring."""

    def __init__(self, settings: StageSettings, spoke: Spoke, name: str, local_host: str) -> None:
        self._settings, self._spoke, self._name, self._local_host = settings, spoke, name, local_host
        loop = asyncio.get_running_loop()
        self._assign: asyncio.Future[Assign] = loop.create_future()
        self._connect: asyncio.Future[Connect] = loop.create_future()
        self._runner = Runner(settings.threads)
        self._sink: Sink = NullTrace()
        self._meter: Meter | None = None
        self._built: Built | None = None
        self._links: list[Channel] = []

    async def run(self) -> None:
        """Join, serve, leave; see ``run_stage``."""
        try:
            await self._take_part()
        except SplitlmError as error:
            await self._tell(trouble(error))
            raise
        except ExceptionGroup as faults:
            await self._tell(trouble(fault(faults)))
            raise
        except asyncio.CancelledError:
            await self._tell(trouble(NetworkError("It was stopped on its own machine")))
            raise
        finally:
            await asyncio.to_thread(self._runner.close, RUNNER_S)
            self._finish_trace()
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
            raise first_error(errors) from None

    async def _listen(self, work: asyncio.Task[None]) -> None:
        """Hear the head until it says Stop."""
        while True:
            match await self._spoke.receive():
                case Assign() as assign if not self._assign.done():
                    self._assign.set_result(assign)
                case Connect() as connect if not self._connect.done():
                    self._connect.set_result(connect)
                case Stop():
                    work.cancel()
                    return
                case Trouble(code=code, text=text):
                    raise reported(code, f"The head gave up: {text}")
                case other:
                    raise ProtocolError(
                        f"A {type(other).__name__} message came from the head", expected="Assign, Connect or Stop"
                    )

    async def _work(self) -> None:
        place = self._settings.place
        await self._spoke.send(Join(self._name, place.begin if place else None, place.end if place else None))
        assign = await self._assign
        self._check(assign.cut, assign.node)
        self._settings.say(f"stage {assign.node}: loading {'; '.join(map(str, assign.cut.held_by(assign.node)))}")
        identity, built = await self._runner.run(self._build, assign)
        self._built = built
        if self._settings.trace_dir is not None:
            self._sink = Trace(trace_path(self._settings.trace_dir, assign.node))
        self._sink.write(built.meta)
        self._meter = Meter(assign.node, self._sink, assign.cut.epoch)
        try:
            inbound, outbound = await self._link(assign, identity, built)
            await self._spoke.send(Ready())
            self._settings.say(f"stage {assign.node}: ready")
            await self._serve(built.relays[0], inbound, outbound, self._meter)
        except PeerLostError:
            await asyncio.sleep(GRACE_S)
            raise
        finally:
            await asyncio.gather(*(link.close() for link in self._links))

    def _build(self, assign: Assign) -> tuple[Identity, Built]:
        """Load this stage's segments, and read what it is to claim of its model. Runs on the compute thread."""
        folder = self._settings.resolve(self._settings.model or assign.model)
        files = ModelFiles(folder, family=assign.family, dtype=assign.dtype)
        settings = BuildSettings(
            "hf" if assign.loader == "hf" else "shard",
            assign.compute,
            self._settings.threads or assign.threads,
            assign.pace_ms,
        )
        built = build_node(files, assign.cut, assign.node, self._name, settings)
        name = f"stage {assign.node} ({self._name})"
        claims = claims_for(name, files, ring=assign.ring, place=assign.node, epoch=assign.cut.epoch)
        return Identity(claims, self._settings.token), built

    def _check(self, cut: Cut, node: int) -> None:
        if not 0 < node < cut.stages:
            raise ProtocolError(f"The head assigned node {node} of {cut.stages}", expected="a node after the head")
        place = self._settings.place
        held = cut.held_by(node)[0]
        last = node == cut.stages - 1
        if place and (held.begin != place.begin or (held.end != place.end and not (place.end < 0 and last))):
            raise CutError(f"The head's cut gives this stage {held}", expected=f"blocks [{place.begin}, {place.end})")

    async def _link(self, assign: Assign, identity: Identity, built: Built) -> tuple[Channel, Channel]:
        """Listen for the previous node, tell the head, and connect to the next one; in whichever order they come."""
        place, deadline = self._settings.place, self._settings.deadline_s
        listen = place.listen if place else self._settings.listen
        before = f"node {assign.node - 1}"
        listener = await tcp.listen(listen[0] or self._local_host, listen[1], identity, "data", expect_peer=before)
        try:
            await self._spoke.send(
                Loaded(self._settings.advertise, listener.port, built.meta.parameters, built.meta.resident_bytes)
            )
            after = assign.cut.next_node(assign.node)

            async def dial() -> Channel:
                told = await self._connect
                host, port = place.send if place else (told.host or self._spoke.hub_host, told.port)
                who = f"node {after}" if after else "the head"
                return self._keep(await tcp.connect(host, port, identity, "data", deadline_s=deadline, who=who), after)

            async def answer() -> Channel:
                await self._connect  # before it nobody dials; the others may still be loading
                return self._keep(await listener.accept(deadline_s=deadline, who=before), assign.node - 1)

            async with asyncio.TaskGroup() as group:
                dialled, answered = group.create_task(dial()), group.create_task(answer())
            return answered.result(), dialled.result()
        except* SplitlmError as errors:
            raise first_error(errors) from None
        finally:
            await listener.close()

    def _keep(self, link: Channel, place: int) -> Channel:
        """A link that was made: it is closed when this stage leaves, and its other end must be this node."""
        self._links.append(link)
        check_place(link, place)
        return link

    async def _serve(self, relay: Relay, inbound: Channel, outbound: Channel, meter: Meter) -> None:
        """Receive, run, send."""
        while True:
            frame = await inbound.receive()
            step = await self._runner.run(relay.handle, frame)
            before = outbound.bytes_out
            if step.header is not None:
                await outbound.send(step.header, step.tensors)
            # The next stage waits for the frame; what is only for us comes after it.
            size, arrived, header = frame.nbytes, frame.received_ns, frame.header
            frame.release()
            if isinstance(header, Hidden):
                sent = time.monotonic_ns() if step.header is not None else step.end_ns
                meter.write(
                    meter.measure(
                        step,
                        arrived_ns=arrived,
                        sent_ns=sent,
                        prefill=step.prefill,
                        bytes_in=size,
                        bytes_out=outbound.bytes_out - before,
                    )
                )

    def _finish_trace(self) -> None:
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
        )
