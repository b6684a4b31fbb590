"""What is left of a meeting that is cancelled at any moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol


class Closes(Protocol):
    """What a meeting makes."""

    async def close(self) -> None:
        """Give it back."""


def sockets() -> set[str]:
    """Sockets of this process, by the kernel's numbers (Linux)."""
    found: set[str] = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(descriptor.readlink()))
    return {link for link in found if link.startswith("socket:")}


Moments = Iterable[Callable[[], Awaitable[None]]]
"""What is waited for before a meeting is cancelled, in turn."""


async def leaves_nothing(make: Callable[[], Awaitable[Closes]], moments: Moments) -> int:
    """Begin it, cancel it after each moment, and close it where it is done by then; how often it was done.

    Raises:
        AssertionError: a socket or a task was left.
    """
    finished = 0
    for i, moment in enumerate(moments):
        before = sockets(), asyncio.all_tasks()

        def left(before: tuple[set[str], set[asyncio.Task[object]]] = before) -> tuple[object, ...]:
            return tuple(now - then for now, then in zip((sockets(), asyncio.all_tasks()), before, strict=True))

        task = asyncio.ensure_future(make())
        await moment()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).close()
            finished += 1
        for _ in range(500):
            if not any(left()):
                break
            await asyncio.sleep(0.01)
        assert not any(left()), (i, left())
    return finished


def turns(count: int) -> Moments:
    """After 0, 1, … turns of the loop."""

    async def pass_turns(number: int) -> None:
        for _ in range(number):
            await asyncio.sleep(0)

    for number in range(count):
        yield lambda number=number: pass_turns(number)  # type: ignore[misc]


def pauses(count: int, step_s: float) -> Moments:
    """After 0, 1, … steps of time."""
    for number in range(count):
        yield lambda number=number: asyncio.sleep(number * step_s)  # type: ignore[misc]
