"""A stage at work: receive, run, send.

A stage whose engine lets sessions share a step takes the decode steps that are there already, up to the engine's width,
as one. It never waits for more, and any frame that cannot share ends the step and has its turn right after: so the
order of frames is the same as if each were a step of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitlm.core.errors import NetworkError
from splitlm.infer.meter import Meter
from splitlm.infer.outlet import at_once
from splitlm.infer.relay import Relay, Step
from splitlm.model.runner import Runner, memory_told
from splitlm.wire.channel import Channel, DirectReader
from splitlm.wire.frame import Frame


@dataclass
class _Done:
    """Frames and what came of them.

    Attributes:
        sizes: bytes that each step sent, of those that need nothing to be sent any more.
        sent_ns: when the last of them was sent; 0 while some have to be.
    """

    frames: Sequence[Frame]
    steps: Sequence[Step]
    sizes: list[int]
    sent_ns: int = 0

    @property
    def left(self) -> Sequence[Step]:
        """Steps whose frames have to be sent."""
        return self.steps[len(self.sizes) :]


async def serve(runner: Runner, relay: Relay, inbound: Channel, outbound: Channel, meter: Meter) -> None:
    """Until cancelled.

    Where the way in is a plain socket the compute thread reads it itself, and a small frame comes, is worked on and
    leaves without waking another thread. What cannot leave at once goes through the loop, and no other frame is read
    until it has left.

    Raises:
        NetworkError: a neighbour is gone, or sent what has no place here.
        SplitlmError: memory ran out, and not in a step of one session, which ends that session alone.
    """
    await memory_told(_serve(runner, relay, inbound, outbound, meter))


async def _serve(runner: Runner, relay: Relay, inbound: Channel, outbound: Channel, meter: Meter) -> None:
    loop = asyncio.get_running_loop()
    relay.node = meter.node

    def work(frames: Sequence[Frame]) -> _Done:
        """On the compute thread: the steps, their frames sent as far as that is possible from there."""
        steps = relay.advance_many(frames)
        done = _Done(frames, steps, at_once(outbound, [(step.header, step.tensors) for step in steps]))
        if not done.left:
            done.sent_ns = time.monotonic_ns()
        for step in steps:
            relay.weigh(step)
        return done

    def pass_on(frames: Sequence[Frame]) -> _Done | None:
        """On the compute thread: all of it, or what the loop has to send."""
        done = work(frames)
        if not done.sent_ns:
            return done
        loop.call_soon_threadsafe(note, done)
        return None

    def note(done: _Done) -> None:
        """The next stage has the frames; what is only for us comes after that."""
        for frame, step, size in zip(done.frames, done.steps, done.sizes, strict=True):
            nbytes, arrived = frame.nbytes, frame.received_ns
            frame.release()
            if step.rows:
                record = meter.measure(
                    step,
                    arrived_ns=arrived,
                    sent_ns=done.sent_ns,
                    prefill=step.prefill,
                    bytes_in=nbytes,
                    bytes_out=size,
                )
                meter.write(record)

    reader = inbound.take_over()
    direct = _Direct(relay, reader) if reader is not None else None
    queued = _Queued(relay, inbound)
    while True:
        if direct is not None:
            done = await runner.listen(direct, pass_on)
        else:
            done = await runner.run(work, await queued.receive())
        for step in done.left:
            before = outbound.bytes_out
            if step.header is not None:
                await outbound.send(step.header, step.tensors)
            done.sizes.append(outbound.bytes_out - before)
        done.sent_ns = done.sent_ns or time.monotonic_ns()
        note(done)


class _Direct:
    """What the compute thread reads: the frames of one step at a time. A ``Source`` of the runner.

    Args:
        reader: of the way in.
    """

    def __init__(self, relay: Relay, reader: DirectReader) -> None:
        self._relay, self._reader = relay, reader
        self._next: Frame | None = None
        self._wide = relay.width > 1
        self.fileno: Callable[[], int] = reader.fileno
        self.attach: Callable[[Callable[[], None]], None] = reader.attach

    def read(self) -> Sequence[Frame] | None:
        """See ``DirectReader.read``; what it raises waits until the frames that came before were taken."""
        first, self._next = self._next, None
        if first is None and (first := self._reader.read()) is None:
            return None
        if not self._wide or not self._relay.joins(first):
            return (first,)
        frames = [first]
        with contextlib.suppress(NetworkError):  # the next read raises it again
            while (frame := self._reader.read()) is not None:
                if not self._relay.joins(frame, frames):
                    self._next = frame
                    break
                frames.append(frame)
        return frames


class _Queued:
    """The same of a channel that the event loop reads."""

    def __init__(self, relay: Relay, inbound: Channel) -> None:
        self._relay, self._inbound = relay, inbound
        self._next: Frame | None = None
        self._wide = relay.width > 1

    async def receive(self) -> Sequence[Frame]:
        """The frames of the next step."""
        first, self._next = self._next, None
        if first is None:
            first = await self._inbound.receive()
        if not self._wide or not self._relay.joins(first):
            return (first,)
        frames = [first]
        while self._inbound.pending:
            frame = await self._inbound.receive()
            if not self._relay.joins(frame, frames):
                self._next = frame
                break
            frames.append(frame)
        return frames
