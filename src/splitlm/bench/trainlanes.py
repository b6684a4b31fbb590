"""The lanes between an owner and a worker as an echo: ``finetune/plane`` over ``link/tcp``, hand-overs included.

What arrives is copied out of its frame on the compute thread, as a party does before it computes.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import torch

from splitlm.bench.arm import Arm
from splitlm.bench.linkecho import DEADLINE_S, identity
from splitlm.core.errors import NetworkError
from splitlm.core.shape import Role
from splitlm.finetune.plane import LANES, Neighbour, Plane
from splitlm.finetune.window import Lane, Out
from splitlm.link import tcp
from splitlm.model import payload
from splitlm.model.runner import Runner
from splitlm.telemetry.summary import percentile
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Backward, Forward, Frame
from splitlm.wire.pool import BufferPool

POOL_BYTES = 64 * 1024 * 1024
"""As ``learning.u-shape.pool-bytes`` says where nothing else is asked for."""
WHOLE, SHORT = 0, 1
"""What ``Forward.index`` asks the server to answer with: all that came, or one number."""


class _End:
    """One end of the lanes, with its loop and its compute thread."""

    def __init__(self, peer: Role) -> None:
        self.loop, self.runner = asyncio.Runner(), Runner(1)
        self._pools = {lane: BufferPool(POOL_BYTES) for lane in LANES}
        self.peer: Neighbour = (peer, 0)
        self.plane = self.loop.run(self._made())
        self._waiting: asyncio.Task[Any] | None = None

    async def _made(self) -> Plane:
        return Plane(self._on_lost)

    def _on_lost(self, _: Neighbour, __: NetworkError) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    def pool(self, lane: Lane) -> BufferPool:
        """Its receive buffers."""
        return self._pools[lane]

    async def next(self) -> Frame:
        """The next frame; once the peer is gone, whoever waits for one is cancelled."""
        self._waiting = asyncio.current_task()
        while (arrival := self.plane.next()) is None:
            await self.plane.arrived()
        return arrival[1]

    def close(self) -> None:
        """Free everything."""
        self.loop.run(self.plane.close())
        self.runner.close()
        self.loop.close()


def taken(frame: Frame) -> torch.Tensor:
    """On the compute thread: the first tensor in memory of its own, as an engine takes it; the frame is released."""
    try:
        return payload.load(frame.header.tensors[0], frame.tensors[0]).clone()
    finally:
        frame.release()


class LaneServer:
    """The worker's end."""

    def __init__(self) -> None:
        self._end = _End("owner")
        self._doors = self._end.loop.run(self._listen())
        self.told: dict[str, Any] = {"ports": {lane: door.port for lane, door in self._doors.items()}}

    async def _listen(self) -> dict[Lane, tcp.TcpListener]:
        return {
            lane: await tcp.listen("127.0.0.1", 0, identity("worker"), lane, pool=self._end.pool(lane))
            for lane in LANES
        }

    def run(self) -> dict[str, Any]:
        """Answer until the owner goes away."""
        with suppress(asyncio.CancelledError):
            self._end.loop.run(self._serve())
        return {}

    async def _serve(self) -> None:
        end = self._end
        for lane, door in self._doors.items():
            end.plane.attach(end.peer, lane, await door.accept(deadline_s=DEADLINE_S))
        while True:
            frame = await end.next()
            header = frame.header
            tensor = await end.runner.run(taken, frame)
            if isinstance(header, Forward):
                back = tensor if header.index == WHOLE else tensor[:1]
                answer = Backward(round=0, window=0, owner=0, index=header.index, part=0)
                await end.plane.send(end.peer, Out("gradient", "owner", 0, answer, (back,)))

    def close(self) -> None:
        """Free everything."""
        for door in self._doors.values():
            self._end.loop.run(door.close())
        self._end.close()


class LaneEcho:
    """The owner's end; the worker's is a child process."""

    def __init__(self) -> None:
        self._server = Arm("train-lane-server").ready()
        self._end = _End("worker")
        self._server.ask()
        self._end.loop.run(self._link())
        self.told: dict[str, Any] = {}

    async def _link(self) -> None:
        for lane, port in self._server.told["ports"].items():
            channel: Channel = await tcp.connect(
                "127.0.0.1",
                int(port),
                identity("owner"),
                lane,
                deadline_s=DEADLINE_S,
                who="the worker",
                pool=self._end.pool(lane),
            )
            self._end.plane.attach(self._end.peer, lane, channel)

    def run(self, *, size: int, count: int, whole: bool = True) -> dict[str, Any]:
        """Milliseconds from handing an activation over to having its gradient on the compute thread, p50.

        Args:
            size: bytes of the activation.
            count: how many, one after the other.
            whole: whether the gradient is as large; otherwise it is one number, and nearly all is one way's.
        """
        return self._end.loop.run(self._trips(size, count, WHOLE if whole else SHORT))

    async def _trips(self, size: int, count: int, index: int) -> dict[str, Any]:
        end, tensor, trips = self._end, torch.zeros(size // 4), []
        header = Forward(round=0, window=0, owner=0, index=index, part=1, weight=1)
        for _ in range(count):
            begin = time.perf_counter_ns()
            await end.plane.send(end.peer, Out("activation", "worker", 0, header, (tensor,)))
            await end.runner.run(taken, await end.next())
            trips.append((time.perf_counter_ns() - begin) / 1e6)
        return {"ms": percentile(trips, 50)}

    def close(self) -> None:
        """End both."""
        self._end.close()
        self._server.close()
