"""Our own link as an echo: frames over ``link.tcp``, with the hand-over to and from a compute thread on both sides."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from splitlm import __version__
from splitlm.bench.arm import Arm
from splitlm.core.sampling import Sampling
from splitlm.link import tcp
from splitlm.model.runner import Runner
from splitlm.telemetry.summary import percentile
from splitlm.wire.channel import Channel
from splitlm.wire.frame import PROTOCOL, Frame, Header, Hidden, Open, Spec
from splitlm.wire.handshake import Claims, Identity

OPENED = Open(session=1, context=1, sampling=Sampling())
DEADLINE_S = 20.0


def identity(name: str) -> Identity:
    """Both sides know the same token."""
    return Identity(Claims(node=name, version=__version__, protocol=PROTOCOL), "bench")


def hidden(size: int, *, last: bool = True) -> Header:
    """A frame with so many bytes; ``last`` asks for an answer."""
    return Hidden(session=1, epoch=0, position=0, sample=last, tensors=(Spec("uint8", (1, 1, size)),))


def touch(frame: Frame) -> bytes:
    """Stands for compute: looks at the frame and answers with its bytes (a copy, as an output would be)."""
    return bytes(frame.tensors[0]) if frame.tensors else b""


class LinkServer:
    """Answers links until its input ends; each hop goes through the compute thread."""

    def __init__(self) -> None:
        self._loop = asyncio.Runner()
        self._runner = Runner(1)
        self._here = self._loop.run(self._listen())
        self.told: dict[str, Any] = {"port": self._here.port}

    async def _listen(self) -> tcp.TcpListener:
        return await tcp.listen("127.0.0.1", 0, identity("server"), "data")

    def run(self, *, port: int) -> dict[str, Any]:
        """Accept one link in, dial one back, and echo until the peer goes away (a data link carries frames one way)."""
        return self._loop.run(self._serve(port))

    async def _serve(self, port: int) -> dict[str, Any]:
        inbound = await self._here.accept(deadline_s=DEADLINE_S)
        outbound = await tcp.connect("127.0.0.1", port, identity("server"), "data", deadline_s=DEADLINE_S, who="bench")
        await outbound.send(OPENED)
        others = asyncio.create_task(self._others())
        try:
            while True:
                frame = await inbound.receive()
                match frame.header:
                    case Hidden() as header:
                        data = await self._runner.run(touch, frame)
                        frame.release()
                        if header.sample:
                            await outbound.send(header, (data,))
                    case Open():
                        frame.release()
                    case _:
                        return {}
        finally:
            others.cancel()
            await asyncio.gather(inbound.close(), outbound.close())

    async def _others(self) -> None:
        """Further links are greeted and closed: they measure the handshake."""
        while True:
            link = await self._here.accept()
            await link.close()

    def close(self) -> None:
        """Free everything."""
        self._loop.run(self._here.close())
        self._runner.close()
        self._loop.close()


class LinkEcho:
    """Sends to a server process of its own."""

    def __init__(self) -> None:
        self._server = Arm("link-server").ready()
        self._port = int(self._server.told["port"])
        self._loop = asyncio.Runner()
        self._runner = Runner(1)
        self._outbound, self._inbound = self._loop.run(self._link())
        self.told: dict[str, Any] = {}

    async def _link(self) -> tuple[Channel, Channel]:
        listener = await tcp.listen("127.0.0.1", 0, identity("client"), "data")
        self._server.ask(port=listener.port)
        outbound = await tcp.connect(
            "127.0.0.1", self._port, identity("client"), "data", deadline_s=DEADLINE_S, who="the server"
        )
        inbound = await listener.accept(deadline_s=DEADLINE_S)
        await listener.close()
        await outbound.send(OPENED)
        (await inbound.receive()).release()
        return outbound, inbound

    def run(
        self, *, size: int = 0, count: int = 300, stream: bool = False, idle_ms: float = 0.0, handshake: bool = False
    ) -> dict[str, Any]:
        """Milliseconds of one way, hand-overs included; see ``Echo.run``. With ``handshake``, of connect to welcome."""
        if handshake:
            return self._loop.run(self._greet(count))
        if stream:
            return self._loop.run(self._stream(size, count))
        return self._loop.run(self._trips(size, count, idle_ms))

    async def _greet(self, count: int) -> dict[str, Any]:
        times = []
        for _ in range(count):
            begin = time.perf_counter_ns()
            link = await tcp.connect(
                "127.0.0.1", self._port, identity("client"), "data", deadline_s=DEADLINE_S, who="the server"
            )
            times.append((time.perf_counter_ns() - begin) / 1e6)
            await link.close()
        return {"ms": percentile(times, 50)}

    async def _stream(self, size: int, count: int) -> dict[str, Any]:
        data = bytes(size)
        begin = time.perf_counter_ns()
        for i in range(count):
            await self._outbound.send(hidden(size, last=i == count - 1), (data,))
        (await self._inbound.receive()).release()
        return {"ms": (time.perf_counter_ns() - begin) / 1e6 / count}

    async def _trips(self, size: int, count: int, idle_ms: float) -> dict[str, Any]:
        header, data, trips = hidden(size), bytes(size), []
        for _ in range(count):
            if idle_ms:
                await asyncio.sleep(idle_ms / 1e3)
            begin = time.perf_counter_ns()
            await self._outbound.send(header, (data,))
            frame = await self._inbound.receive()
            await self._runner.run(touch, frame)
            frame.release()
            trips.append((time.perf_counter_ns() - begin) / 2e6)
        return {"ms": percentile(trips, 50), "p90": percentile(trips, 90)}

    def close(self) -> None:
        """End both."""
        self._loop.run(self._outbound.close())
        self._loop.run(self._inbound.close())
        self._runner.close()
        self._loop.close()
        self._server.close()
