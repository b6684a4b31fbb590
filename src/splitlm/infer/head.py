"""The head of a ring: requests in, tokens out.

The head owns the first segment, and in a private ring the last one too. It starts every lap and ends every session.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence

import torch

from splitlm.core.errors import ProtocolError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.infer.gate import Gate
from splitlm.infer.meter import Meter
from splitlm.infer.outlet import Outlet, Sent
from splitlm.infer.relay import Relay, Step
from splitlm.infer.request import Request, TokenOut
from splitlm.infer.schedule import Schedule, Turn, chunks, share
from splitlm.infer.session import Lap, Session, error_of, logits_of
from splitlm.model.runner import Runner, memory_told
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Close, Failed, Fence, Frame, Hidden, Open, Token


class Head:
    """Runs any number of sessions through the ring at once.

    Args:
        relays: the head's own segments: the first, and the last where the ring is private.
        outbound: to node 1, and ``inbound`` from the last node; both None where the first segment is the whole model.
        context: the model's context in tokens.
        prefill_chunk: rows per prefill step.
        last_segment: index of the cut's last segment.
        on_lap: called with a session that will take another lap, before it does; may call ``hold``.
    """

    def __init__(
        self,
        relays: list[Relay],
        runner: Runner,
        meter: Meter,
        *,
        outbound: Channel | None,
        inbound: Channel | None,
        context: int,
        prefill_chunk: int,
        last_segment: int = 0,
        on_lap: Callable[[int], None] | None = None,
    ) -> None:
        self.on_lap = on_lap
        self._first = relays[0]
        self._tail = relays[1] if len(relays) > 1 else None
        self._runner, self._meter = runner, meter
        self._outbound, self._inbound = outbound, inbound
        self._context, self._chunk, self._last_segment = context, prefill_chunk, last_segment
        self._schedule = Schedule()
        self._sessions: dict[int, Session] = {}
        self._next_number, self._failures = 1, 0
        self._home: deque[Frame] = deque()
        self._housekeeping: deque[tuple[Relay, Frame]] = deque()
        self._work_there = asyncio.Event()
        self._outlet = Outlet(outbound, self._sent, self._work_there.set)
        self._failed: SplitlmError | None = None
        self._gate = Gate()

    @property
    def sessions(self) -> list[int]:
        """The open sessions."""
        return list(self._sessions)

    def hold(self) -> None:
        """Start no lap any more; what is under way goes on."""
        self._gate.hold()

    async def drained(self) -> None:
        """Wait until every stage has done all that was sent, and send nothing more. Call ``hold`` first.

        A fence travels round the ring behind the last frame. Where a session failed meanwhile, some stages have
        forgotten it and others wait for its Close: that goes next, and another fence behind it.
        """
        if self._outbound is None:
            return
        before = -1
        while before != self._failures:
            before = self._failures
            self._housekeeping.append((self._first, self._gate.fence()))
            self._work_there.set()
            await self._gate.passed()

    def resume(self) -> None:
        """Go on, under the cut that the relays now belong to."""
        self._gate.open()
        self._meter.epoch = self._first.epoch
        self._work_there.set()

    async def run(self) -> None:
        """Serve until cancelled. Whoever runs it tells the sessions why it ended, by ``fail``, once that is known.

        Raises:
            SplitlmError: the ring broke.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(memory_told(self._work()))
                if self._outbound is not None and self._inbound is not None:
                    group.create_task(memory_told(self._outlet.run()))
                    group.create_task(memory_told(self._receive(self._inbound)))
        except* SplitlmError as errors:
            raise first_error(errors) from None

    def fail(self, error: SplitlmError) -> None:
        """Tell every session, and all that come later, that the ring is broken."""
        if self._failed is None:
            self._failed = error
            for session in self._sessions.values():
                self._part(session, error)
            self._sessions.clear()

    async def generate(self, request: Request) -> AsyncIterator[TokenOut]:
        """The tokens of one request, as they come; the last one carries the reason why it is the last.

        Raises:
            PromptError, UsageError: see ``Request.check``.
            ModelError: its logits are not finite; all other sessions go on.
            SplitlmError: memory ran out in a step of this session alone; or the ring broke.
        """
        request.check(self._context, self._first.stage.vocab)
        if self._failed is not None:
            raise self._failed.with_traceback(None)  # it is raised many times, and would keep every caller's frames
        session = self._open(request)
        try:
            while True:
                item = await session.out.get()
                if isinstance(item, Exception):
                    raise item.with_traceback(None)
                yield item
                if item.finish is not None:
                    return
        finally:
            self._end(session)

    def _open(self, request: Request) -> Session:
        number = self._next_number
        self._next_number += 1
        parts = chunks(len(request.prompt), self._chunk)
        session = Session(number, request, time.monotonic_ns(), deque(parts))
        session.arrived_ns = session.asked_ns
        self._sessions[number] = session
        first, sampler = session.opening(self._context)
        if self._tail is not None:
            # The tail is here, so the prompt does not have to leave this machine for its sampler's sake.
            self._housekeeping.append((self._tail, sampler))
        else:
            first = sampler
        self._housekeeping.append((self._first, first))
        self._schedule.ready(number, prefill=True)
        self._work_there.set()
        return session

    def _end(self, session: Session, error: Exception | None = None) -> None:
        """Forget a session here and, through a Close frame that follows its last lap, everywhere; tell its caller."""
        if self._sessions.pop(session.number, None) is None:
            return
        self._housekeeping.append((self._first, Frame(Close(session=session.number))))
        self._work_there.set()
        self._part(session, error)

    def _part(self, session: Session, error: Exception | None) -> None:
        """It takes no more turns: write what is known of it, and tell its caller."""
        self._schedule.forget(session.number)
        lap, session.pending = session.pending, None
        if lap is not None:  # its token will be nobody's
            lap.write(self._meter)
        self._meter.sink.write(session.record(error))
        if error is not None:
            session.out.put_nowait(error)

    def _lose(self, header: Failed) -> None:
        """A stage could not go on with a session, and has forgotten it."""
        self._failures += 1
        if (session := self._sessions.get(header.session)) is not None:
            self._end(session, error_of(header))

    async def _work(self) -> None:
        """One step after the other, the oldest first: frames that came home, then sessions that are ready."""
        while True:
            self._work_there.clear()
            while await self._one():
                pass
            await self._work_there.wait()

    async def _one(self) -> bool:
        if self._home and self._tail is not None:
            await self._end_laps(self._tail)
            return True
        if self._housekeeping and not self._gate.shut:
            relay, frame = self._housekeeping.popleft()
            self._gate.leaving(frame)
            if relay is self._first:
                self._take(await self._run([frame]))
            else:
                await self._runner.run(relay.handle, frame)
            return True
        if self._gate.held:
            return False
        turn = self._schedule.next(backed_up=self._outlet.backed_up)
        if turn is None:
            return False
        await self._begin_laps([turn] if turn.prefill else [turn, *self._riders()])
        return True

    def _riders(self) -> list[Turn]:
        """Who shares the decode step that is about to begin."""
        width = self._first.width
        if width == 1 or not len(self._schedule):
            return []
        decoding = sum(bool(session.tokens) for session in self._sessions.values())
        return self._schedule.riders(share(decoding, self._last_segment + 1, width) - 1)

    async def _begin_laps(self, turns: Sequence[Turn]) -> None:
        """A step of the first segment: a chunk of one session's prompt, or the newest token of each of several."""
        frames, laps = [], []
        for turn in turns:
            session = self._sessions[turn.session]
            frames.append(session.feed(self._first.epoch))
            laps.append(lap := Lap(session.arrived_ns, turn.prefill, session.bytes_in))
            if not session.chunks:
                session.pending = lap  # before the step: its token may be home before we hear that it was sent
        done = await self._run(frames)
        for step in done.steps:
            more = self._sessions.get(step.session)  # it may have been ended meanwhile
            if more is not None and more.chunks:
                more.arrived_ns = step.end_ns
                self._schedule.ready(more.number, prefill=True)
        self._take(done, laps)

    async def _end_laps(self, tail: Relay) -> None:
        """A step of our own last segment, of what came home."""
        frames = [self._home.popleft()]
        if isinstance(frames[0].header, Fence):
            self._gate.home(frames[0].header)
            return
        if tail.width > 1 and tail.joins(frames[0]):
            while self._home and tail.joins(self._home[0], frames):
                frames.append(self._home.popleft())
        steps = await self._runner.run(tail.handle_many, frames)
        for frame, step in zip(frames, steps, strict=True):
            size, arrived = frame.nbytes, frame.received_ns
            frame.release()
            if step.rows:
                record = self._meter.measure(
                    step,
                    arrived_ns=arrived,
                    sent_ns=step.end_ns,
                    prefill=step.prefill,
                    bytes_in=size,
                    bytes_out=0,
                    segment=self._last_segment,
                )
                self._meter.write(record)
        self._heed(steps)

    async def _run(self, frames: Sequence[Frame]) -> Sent:
        """A step of the first segment; what comes of it is sent at once where nothing waits to be sent."""
        return await self._runner.run(self._steps, frames, self._outlet.free)

    def _steps(self, frames: Sequence[Frame], free: bool) -> Sent:
        """Runs on the compute thread, which saves the frames the way through the loop."""
        done = self._outlet.leave(self._first.advance_many(frames), free)
        for step in done.steps:
            self._first.weigh(step)
        return done

    def _take(self, done: Sent, laps: Sequence[Lap] = ()) -> None:
        """What our first relay gave: frames for the next node, tokens for us, or nothing."""
        self._outlet.follow(done, laps)
        self._heed(done.steps)

    def _heed(self, steps: Sequence[Step]) -> None:
        """The tokens and failures among what a relay of ours gave."""
        for step in steps:
            if isinstance(step.header, Token):
                self._accept(step.header, step.logits, time.monotonic_ns(), 0)
            elif isinstance(step.header, Failed):
                self._lose(step.header)

    def _sent(self, laps: Sequence[Lap], when_ns: int) -> None:
        """All frames of a step of the first segment are with the kernel."""
        for lap in laps:
            if lap.step is None or not lap.step.rows:
                continue
            lap.measure(self._meter, lap.step, when_ns)
            session = self._sessions.get(lap.step.session)
            if session is None or session.pending is not lap:
                lap.write(self._meter)

    async def _receive(self, inbound: Channel) -> None:
        while True:
            frame = await inbound.receive()
            match frame.header:
                case Token() as token:
                    logits = logits_of(frame, self._first.stage.vocab)
                    size, when = frame.nbytes, frame.received_ns
                    frame.release()
                    self._accept(token, logits, when, size)
                case Fence() as fence if self._tail is None:
                    frame.release()
                    self._gate.home(fence)
                case Failed() as failed if self._tail is None:
                    frame.release()
                    self._lose(failed)
                case Hidden() | Close() | Failed() | Fence() if self._tail is not None:
                    self._home.append(frame)
                    self._work_there.set()
                case Open() if self._tail is not None:
                    frame.release()  # the tail here was told already
                case other:
                    raise ProtocolError(
                        f"A {type(other).__name__} frame came home", where=inbound.peer, expected="Token"
                    )

    def _accept(self, header: Token, logits: torch.Tensor | None, when_ns: int, size: int) -> None:
        """A token came home: end the session or start its next lap."""
        if header.epoch != self._first.epoch:
            raise ProtocolError(f"A token of epoch {header.epoch} came", expected=f"epoch {self._first.epoch}")
        session = self._sessions.get(header.session)
        if session is None:
            return  # it ended while its last lap was under way
        lap = session.take(header, when_ns, self._first.stage.vocab)
        if lap is not None:
            lap.write(self._meter)
        try:
            session.finish = session.ends_with(header.token, self._context)
        except Exception as error:  # noqa: BLE001 - the caller's own ``accept``: its session ends, the others go on
            self._end(session, error)
            return
        if session.finish is None:
            session.arrived_ns, session.bytes_in = when_ns, size
            self._schedule.ready(session.number, prefill=False)
            if self.on_lap is not None:
                self.on_lap(session.number)
            self._work_there.set()
        # After the next lap was asked for: the reader's thread would take the interpreter from it.
        session.out.put_nowait(TokenOut(header.token, len(session.tokens) - 1, session.finish, logits))
