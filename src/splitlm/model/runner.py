"""The one thread of a process that runs the model; the event loop hands it work and gets results back."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

T = TypeVar("T")
_Job = tuple[Callable[..., Any], tuple[Any, ...], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Runner:
    """A compute thread. Jobs run one after the other, in the order in which they were handed over.

    Args:
        threads: intra-op threads; set in the compute thread too, since OpenMP keeps the number per thread. 0 leaves it.
    """

    def __init__(self, threads: int = 0) -> None:
        self._threads = threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="splitlm-compute", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work(*args)`` on the compute thread; its result, or the error it raised."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._jobs.put((work, args, loop, future))
        return cast(T, await future)

    def close(self, timeout: float = 30.0) -> None:
        """Let the job at hand finish, drop the others, end the thread."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._thread.join(timeout)

    def _work(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        while (job := self._jobs.get()) is not None:
            if self._closed:
                continue
            work, args, loop, future = job
            try:
                result, error = work(*args), None
            except BaseException as raised:  # noqa: BLE001 - handed to the caller, who awaits it
                result, error = None, raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more
            del job, work, args, future, result, error


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
