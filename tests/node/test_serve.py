"""A stage between two sockets: everything that comes in goes out, in order, and an end is noticed at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import cast

import pytest

from splitlm.core.errors import PeerLostError
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay, Step
from splitlm.link.base import StreamChannel
from splitlm.model.runner import Runner
from splitlm.node.serve import serve
from splitlm.telemetry.record import Record
from splitlm.telemetry.record import Step as StepRecord
from splitlm.wire.frame import Close, Fence, Frame, Hidden
from splitlm.wire.pool import BufferPool
from tests.link.test_channel import OPENED, hidden, pair


class Echo:
    """A relay that passes everything on, on the compute thread."""

    width = 1

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()

    def advance_many(self, frames: Sequence[Frame]) -> list[Step]:
        (frame,) = frames
        assert self.hold.wait(10)
        self.threads.add(threading.current_thread().name)
        now = time.monotonic_ns()
        rows = int(isinstance(frame.header, Hidden))
        return [Step(frame.header, [bytes(view) for view in frame.tensors], now, now, 1, rows=rows)]

    def weigh(self, step: Step) -> Step:
        return step


class Records:
    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def write(self, record: Record) -> None:
        assert isinstance(record, StepRecord)
        self.steps.append(record)

    def close(self) -> None:
        pass


Story = Callable[[StreamChannel, StreamChannel, Echo, Runner, "asyncio.Task[None]"], Awaitable[None]]


def run(kind: str, story: Story, pool: BufferPool | None = None) -> list[StepRecord]:
    records = Records()

    async def main() -> None:
        echo, runner = Echo(), Runner()
        async with asyncio.timeout(30), pair(kind, "data", pool) as (a, b), pair(kind) as (c, d):
            task = asyncio.create_task(serve(runner, cast(Relay, echo), b, c, Meter(1, records)))
            try:
                await story(a, d, echo, runner, task)
            finally:
                echo.hold.set()
                task.cancel()
                await asyncio.wait({task})
                await asyncio.to_thread(runner.close)

    asyncio.run(main())
    return records.steps


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_small_and_large_frames_leave_in_the_order_in_which_they_came(kind: str) -> None:
    sizes = [100, 3_000_000, 10, 200_000, 5, 0, 70_000, 1]  # above and below what leaves at once
    pool = BufferPool()

    async def story(a: StreamChannel, d: StreamChannel, echo: Echo, _: Runner, task: asyncio.Task[None]) -> None:
        async def send() -> None:
            await a.send(OPENED)
            for i, size in enumerate(sizes):
                await a.send(hidden(size, i), [bytes([i]) * size])
            await a.send(Fence(7))
            await a.send(Close(1))

        sending = asyncio.create_task(send())
        assert (await d.receive()).header == OPENED
        for i, size in enumerate(sizes):
            await asyncio.sleep(0.002)  # so that the kernel's buffers fill
            frame = await d.receive()
            assert frame.header == hidden(size, i) and bytes(frame.tensors[0]) == bytes([i]) * size
            frame.release()
        assert (await d.receive()).header == Fence(7)
        assert (await d.receive()).header == Close(1)
        await sending
        assert echo.threads == {"splitlm-compute"} and not task.done()

    steps = run(kind, story, pool)
    assert len(steps) == len(sizes)
    assert all(step.bytes_in == step.bytes_out > size for step, size in zip(steps, sizes, strict=True))
    assert pool.lent_bytes == 0
    for before, after in pairwise(steps):  # a stage's times lie end to end
        gone = after.recv_wait_ms + after.queue_ms
        assert after.start_ns / 1e6 - gone == pytest.approx(before.end_ns / 1e6 + before.send_ms, abs=1e-3)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_the_neighbour_s_end_is_noticed_while_nothing_comes(kind: str) -> None:
    async def story(a: StreamChannel, d: StreamChannel, _: Echo, __: Runner, task: asyncio.Task[None]) -> None:
        await a.send(OPENED)
        await d.receive()
        a.cut()
        with pytest.raises(PeerLostError, match=r"^a at "):
            await task

    run(kind, story)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_what_came_before_the_neighbour_s_end_is_still_passed_on(kind: str) -> None:
    async def story(a: StreamChannel, d: StreamChannel, echo: Echo, _: Runner, task: asyncio.Task[None]) -> None:
        echo.hold.clear()
        await a.send(OPENED)
        await a.send(hidden(5), [b"hello"])
        closing = asyncio.create_task(a.close())
        await asyncio.sleep(0.01)
        echo.hold.set()
        assert (await d.receive()).header == OPENED
        assert bytes((await d.receive()).tensors[0]) == b"hello"
        with pytest.raises(PeerLostError, match=r"^a at "):
            await task
        await closing

    run(kind, story)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_jobs_run_between_frames_and_while_a_frame_waits_to_leave(kind: str) -> None:
    async def story(a: StreamChannel, d: StreamChannel, _: Echo, runner: Runner, task: asyncio.Task[None]) -> None:
        await a.send(OPENED)
        await d.receive()
        assert await runner.run(threading.current_thread) is runner._thread
        sending = asyncio.gather(*(a.send(hidden(8_000_000, i), [bytes(8_000_000)]) for i in range(2)))
        await asyncio.sleep(0.05)  # nobody reads: the first is stuck
        assert await asyncio.wait_for(runner.run(threading.current_thread), 10) is runner._thread
        for _i in range(2):
            (await d.receive()).release()
        await sending
        assert not task.done()

    run(kind, story)


def test_the_next_node_s_end_is_noticed_when_it_is_sent_to() -> None:
    async def story(a: StreamChannel, d: StreamChannel, _: Echo, __: Runner, task: asyncio.Task[None]) -> None:
        await a.send(OPENED)
        await d.receive()
        d.cut()
        with pytest.raises(PeerLostError, match=r"^b at "):
            for i in range(1000):
                await a.send(hidden(100, i), [bytes(100)])
                if task.done():
                    break
                await asyncio.sleep(0.001)
            await task

    run("tcp", story)
