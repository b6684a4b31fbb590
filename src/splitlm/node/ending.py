"""Ends that are taken whole: what a node holds is given back though its task is cancelled a second time meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack


async def leave(*steps: Callable[[], Awaitable[object]]) -> None:
    """Take each step, in this order and whatever became of the one before it.

    The steps themselves have to end: nothing here cuts them short. (A second Ctrl-C does: ``asyncio.run`` then cancels
    every task.)

    Raises:
        asyncio.CancelledError: it was cancelled meanwhile; from what a step raised, if one did.
        BaseException: what a step raised.
    """
    task = asyncio.create_task(_each(steps))
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    error = None if task.cancelled() else task.exception()
    if cancelled or task.cancelled():
        raise asyncio.CancelledError from error
    if error is not None:
        raise error


async def _each(steps: tuple[Callable[[], Awaitable[object]], ...]) -> None:
    async with AsyncExitStack() as stack:
        for step in reversed(steps):
            stack.push_async_callback(step)
