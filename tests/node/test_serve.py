"""A stage between two sockets: everything that comes in goes out, in order, and an end is noticed at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import cast

import msgspec
import pytest

from splitlm.core.errors import PeerLostError
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay, Step
from splitlm.link.base import StreamChannel
from splitlm.model.runner import Runner
from splitlm.node.serve import serve
from splitlm.telemetry.record import Record
from splitlm.telemetry.record import Step as StepRecord
from splitlm.wire.frame import Buffer, Close, Fence, Frame, Header, Hidden
from splitlm.wire.pool import BufferPool
from tests.link.test_channel import OPENED, hidden, pair


class Echo:
    """A relay that passes everything on, on the compute thread; frames of distinct sessions share a step.

    Attributes:
        taken: the sessions of every step of rows.
    """

    def __init__(self, width: int = 1) -> None:
        self.width = width
        self.taken: list[list[int]] = []
        self.threads: set[str] = set()
        self.hold = threading.Event()
        self.hold.set()

    def joins(self, frame: Frame, others: Sequence[Frame] = ()) -> bool:
        assert self.width > 1, "nobody asks where nothing is shared"
        sessions = [other.header.session for other in others if isinstance(other.header, Hidden)]
        header = frame.header
        return isinstance(header, Hidden) and header.session not in sessions and len(sessions) < self.width

    def advance_many(self, frames: Sequence[Frame]) -> list[Step]:
        assert self.hold.wait(10)
        self.threads.add(threading.current_thread().name)
        start = time.monotonic_ns()
        self.taken.append([frame.header.session for frame in frames if isinstance(frame.header, Hidden)])
        steps = []
        for frame in frames:
            rows = int(isinstance(frame.header, Hidden))
            tensors = [bytes(view) for view in frame.tensors]
            steps.append(Step(frame.header, tensors, start, start + 1000, 1, rows=rows, batch=len(frames)))
        return steps

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


def run(kind: str, story: Story, pool: BufferPool | None = None, width: int = 1) -> list[StepRecord]:
    records = Records()

    async def main() -> None:
        echo, runner = Echo(width), Runner()
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


async def busy(echo: Echo, runner: Runner) -> asyncio.Task[bool]:
    """The compute thread does something else until ``echo.hold`` is set."""
    echo.hold.clear()
    began = threading.Event()

    def wait() -> bool:
        began.set()
        return echo.hold.wait(10)

    held = asyncio.ensure_future(runner.run(wait))
    while not began.is_set():
        await asyncio.sleep(0.001)
    return held


def row(session: int, size: int = 8) -> Hidden:
    return msgspec.structs.replace(hidden(size), session=session)


@pytest.mark.parametrize("kind", ["memory", "tcp"])
@pytest.mark.parametrize("width", [1, 3])
def test_frames_that_are_there_share_steps_and_all_leave_in_their_order(
    kind: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Header] = [*map(row, (1, 2, 3, 4, 1)), Fence(7), row(2), row(3), Close(3), row(4), row(4), row(5)]
    shared = [[], [1, 2, 3], [4, 1], [], [2, 3], [], [4], [4, 5]]
    pool = BufferPool()
    together: list[int] = []
    send = StreamChannel.send_together

    def counted(self: StreamChannel, frames: Sequence[tuple[Header, Sequence[Buffer]]]) -> list[int]:
        sizes = send(self, frames)
        together.append(len(sizes))
        return sizes

    monkeypatch.setattr(StreamChannel, "send_together", counted)

    async def story(a: StreamChannel, d: StreamChannel, echo: Echo, runner: Runner, task: asyncio.Task[None]) -> None:
        await a.send(OPENED)
        assert (await d.receive()).header == OPENED
        held = await busy(echo, runner)
        for header in sent:
            await a.send(header, [bytes(8)] if isinstance(header, Hidden) else [])
        await asyncio.sleep(0.05)
        echo.hold.set()
        await held
        for header in sent:
            frame = await d.receive()
            assert frame.header == header
            frame.release()
        expected = shared if width == 3 else [[], *([s.session] if isinstance(s, Hidden) else [] for s in sent)]
        assert echo.taken == expected
        assert not task.done()

    steps = run(kind, story, pool, width)
    assert [step.batch for step in steps] == ([3, 3, 3, 2, 2, 2, 2, 1, 2, 2] if width == 3 else [1] * 10)
    assert pool.lent_bytes == 0
    sizes = {(step.bytes_in, step.bytes_out) for step in steps}
    assert len(sizes) == 1 and all(came == gone > 8 for came, gone in sizes)
    assert together == ([3, 2, 2, 2] if (width, kind) == (3, "tcp") else [0] * 4 if width == 3 else [])
    times = {(step.start_ns, step.send_ms) for step in steps[:3]}
    assert len(times) == (1 if width == 3 else 3), "one step: its times are those of all"


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_what_cannot_leave_at_once_leaves_behind_what_did(kind: str) -> None:
    """A large frame among those of one step goes by the loop, and so do those after it."""
    sizes = {1: 10, 2: 3_000_000, 3: 20, 4: 200_000}

    async def story(a: StreamChannel, d: StreamChannel, echo: Echo, runner: Runner, _: asyncio.Task[None]) -> None:
        await a.send(OPENED)
        assert (await d.receive()).header == OPENED
        held = await busy(echo, runner)
        sending = [asyncio.ensure_future(a.send(row(s, n), [bytes([s]) * n])) for s, n in sizes.items()]
        await asyncio.sleep(0.05)
        echo.hold.set()
        await held
        for session, size in sizes.items():
            frame = await d.receive()
            assert frame.header == row(session, size) and bytes(frame.tensors[0]) == bytes([session]) * size
            frame.release()
        await asyncio.gather(*sending)

    steps = run(kind, story, BufferPool(), 8)
    assert [step.bytes_out // 10 * 10 > size for step, size in zip(steps, sizes.values(), strict=True)] == [True] * 4


@pytest.mark.parametrize("kind", ["memory", "tcp"])
def test_frames_before_the_neighbour_s_end_share_a_step_and_the_end_is_told_after_it(kind: str) -> None:
    async def story(a: StreamChannel, d: StreamChannel, echo: Echo, runner: Runner, task: asyncio.Task[None]) -> None:
        await a.send(OPENED)
        assert (await d.receive()).header == OPENED
        held = await busy(echo, runner)
        for session in (1, 2):
            await a.send(row(session), [bytes(8)])
        closing = asyncio.create_task(a.close())
        await asyncio.sleep(0.05)
        echo.hold.set()
        await held
        for session in (1, 2):
            assert (await d.receive()).header == row(session)
        with pytest.raises(PeerLostError, match=r"^a at "):
            await task
        await closing
        assert echo.taken == [[], [1, 2]]

    run(kind, story, width=4)
