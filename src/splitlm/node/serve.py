"""A stage at work: receive, run, send."""

from __future__ import annotations

import time

from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay, Step
from splitlm.model.runner import Runner
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Frame, Hidden


async def serve(runner: Runner, relay: Relay, inbound: Channel, outbound: Channel, meter: Meter) -> None:
    """Until cancelled.

    Raises:
        NetworkError: a neighbour is gone, or sent what has no place here.
    """

    def work(frame: Frame) -> tuple[Step, int]:
        """On the compute thread: the step, and when its frame was sent if that was possible from there."""
        step = relay.handle(frame)
        if step.header is None:
            return step, step.end_ns
        return step, time.monotonic_ns() if outbound.send_now(step.header, step.tensors) else 0

    while True:
        frame = await inbound.receive()
        before = outbound.bytes_out
        step, sent_ns = await runner.run(work, frame)
        if not sent_ns and step.header is not None:
            await outbound.send(step.header, step.tensors)
            sent_ns = time.monotonic_ns()
        # The next stage waits for the frame; what is only for us comes after it.
        size, arrived, header = frame.nbytes, frame.received_ns, frame.header
        frame.release()
        if isinstance(header, Hidden):
            record = meter.measure(
                step,
                arrived_ns=arrived,
                sent_ns=sent_ns,
                prefill=step.prefill,
                bytes_in=size,
                bytes_out=outbound.bytes_out - before,
            )
            meter.write(record)
