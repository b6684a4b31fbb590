"""A stage at work: receive, run, send."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay, Step
from splitlm.model.runner import Runner, memory_told
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Frame


@dataclass(frozen=True)
class _Done:
    """A frame's step, and when what came of it was sent (ns); 0 where it still has to be."""

    step: Step
    sent_ns: int
    bytes_out: int


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

    def work(frame: Frame) -> _Done:
        """On the compute thread: the step, its frame sent if that is possible from there."""
        before = outbound.bytes_out
        step, sent_ns = relay.advance(frame), 0
        if step.header is None:
            sent_ns = step.end_ns
        elif outbound.send_now(step.header, step.tensors):
            sent_ns = time.monotonic_ns()
        return _Done(relay.weigh(step), sent_ns, outbound.bytes_out - before)

    def pass_on(frame: Frame) -> tuple[Frame, _Done] | None:
        """On the compute thread: all of it, or what the loop has to send."""
        done = work(frame)
        if not done.sent_ns:
            return frame, done
        loop.call_soon_threadsafe(note, frame, done)
        return None

    def note(frame: Frame, done: _Done) -> None:
        """The next stage has the frame; what is only for us comes after that."""
        size, arrived = frame.nbytes, frame.received_ns
        frame.release()
        if done.step.rows:
            record = meter.measure(
                done.step,
                arrived_ns=arrived,
                sent_ns=done.sent_ns,
                prefill=done.step.prefill,
                bytes_in=size,
                bytes_out=done.bytes_out,
            )
            meter.write(record)

    reader = inbound.take_over()
    while True:
        if reader is not None:
            frame, done = await runner.listen(reader, pass_on)
        else:
            frame = await inbound.receive()
            done = await runner.run(work, frame)
        if not done.sent_ns and done.step.header is not None:
            before = outbound.bytes_out
            await outbound.send(done.step.header, done.step.tensors)
            done = _Done(done.step, time.monotonic_ns(), outbound.bytes_out - before)
        note(frame, done)
