"""Who is at work says so from a timer: a long microbatch, load or average is not taken for a dead party."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from splitlm.finetune.compute import Compute

PART = 0.25
"""Part of ``timeout-seconds`` after which who is at work says so again."""


class Pulse:
    """Says so while something moves; to be entered with ``async with``, at whose end it is cancelled.

    A party that waits says nothing: what it waits for is what may be dead.

    Args:
        say: tells it.
        timeout_s: how long a silent party is waited for.
        compute: its jobs are its work.
        moved: has another value whenever something else did: bytes that came or went.
    """

    def __init__(
        self, say: Callable[[], Awaitable[None]], timeout_s: float, compute: Compute, moved: Callable[[], object]
    ) -> None:
        self._say, self._every_s, self._compute, self._moved = say, timeout_s * PART, compute, moved
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pulse:
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _beat(self) -> None:
        last: object = None
        while True:
            now = (self._compute.jobs, self._moved())
            if self._compute.busy or now != last:
                await self._say()
            last = now
            await asyncio.sleep(self._every_s)
