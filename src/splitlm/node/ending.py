"""Ends that are taken whole: what a node holds is given back though its task is cancelled a second time meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack


async def leave(*steps: Callable[[], Awaitable[object]]) -> None:
    """Take each step, in this order and whatever became of the one before it.

    A cancellation that comes meanwhile, or what a step raised, is raised after the last. The steps themselves have to
    end: nothing here cuts them short. (A second Ctrl-C does: ``asyncio.run`` then cancels every task.)
    """
    task = asyncio.create_task(_each(steps))
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    task.result()
    if cancelled:
        raise asyncio.CancelledError


async def _each(steps: tuple[Callable[[], Awaitable[object]], ...]) -> None:
    async with AsyncExitStack() as stack:
        for step in reversed(steps):
            stack.push_async_callback(step)
