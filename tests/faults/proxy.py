"""A TCP relay in a thread: slow, or with damage done to what passes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import TracebackType

from splitlm.node.thread import LoopThread

Mangle = Callable[[bytes, int], bytes | None]
"""``mangle(data, offset)``: what to pass on of the bytes at this offset; None ends the stream after 7 of them."""
HOST = "127.0.0.1"


class Proxy:
    """Listens at ``port`` and passes on to ``to``; a context manager.

    Args:
        mangle: of the dialler's bytes.
        delay_s: one way.
        rate: bytes per second.
    """

    def __init__(
        self, port: int, to: int, *, mangle: Mangle | None = None, delay_s: float = 0.0, rate: float = 0.0
    ) -> None:
        self._port, self._to = port, to
        self._mangle, self._delay_s, self._rate = mangle, delay_s, rate
        self._thread = LoopThread("splitlm-test-proxy")
        self._writers: list[asyncio.StreamWriter] = []
        self.stall = False

    def __enter__(self) -> Proxy:
        self._thread.call(self._listen())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._stop())
        self._thread.close()

    async def _stop(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.01)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, self._port)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(500):
            with contextlib.suppress(OSError):
                self._writers.append(writer)
                there, back = await asyncio.open_connection(HOST, self._to)
                self._writers.append(back)
                break
            await asyncio.sleep(0.02)
        with contextlib.suppress(OSError):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, back, self._mangle))
                group.create_task(self._pump(there, writer, None))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, mangle: Mangle | None) -> None:
        at, ready = 0, 0.0
        loop = asyncio.get_running_loop()
        try:
            while data := await reader.read(4096):
                if self._rate:
                    ready = max(ready, loop.time()) + len(data) / self._rate
                    await asyncio.sleep(max(0.0, ready - loop.time()))
                await asyncio.sleep(self._delay_s)
                while self.stall:
                    await asyncio.sleep(0.05)
                passed = mangle(data, at) if mangle else data
                at += len(data)
                if passed is None:
                    writer.write(data[:7])
                    break
                writer.write(passed)
                await writer.drain()
        except OSError:
            pass
        writer.close()
