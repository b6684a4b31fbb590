"""An event loop in a thread of its own: how callers without one own a node."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from splitlm.core.errors import NetworkError, SplitlmError

T = TypeVar("T")


def not_open() -> SplitlmError:
    """The error of whoever uses a ring that is not open, or no longer."""
    return NetworkError("The ring is not open", remedy="Use it in a with block")


class LoopThread:
    """Runs coroutines that any thread hands in, until ``close``; what still runs then is cancelled.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(_stay(started)), name=name, daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result()

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, where the thread does not exist: it belongs to the parent alone."""
        return os.getpid() != self._pid

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine on the loop.

        Raises:
            NetworkError: the loop was closed, or belongs to the process that this one was forked from.
        """
        if self.forked:  # before the lock, which some thread may have held when the process forked
            work.close()
            raise NetworkError(
                f"The ring belongs to process {self._pid}, and this one, {os.getpid()}, was forked from it",
                expected="calls from the process that opened it",
                remedy="Open a ring of its own in this process, or start it with spawn and not with fork",
            )
        # Under the lock: the loop begins what was handed in before ``close``, and so also cancels it. Nobody waits in
        # vain for a coroutine that never ran.
        with self._lock:
            if self._closed:
                work.close()
                raise not_open()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for its result.

        Raises:
            NetworkError: the loop was closed before there was one.
        """
        try:
            return self.submit(work).result()
        except CancelledError:
            raise not_open() from None

    def iterate(self, items: AsyncIterator[T]) -> Generator[T, None, None]:
        """What an iterator of the loop gives, in the calling thread; leaving early cancels it. Its errors are raised.

        Raises:
            NetworkError: the loop was closed in the middle.
        """
        out: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for item in items:
                    out.put((item,))
                out.put(None)
            except asyncio.CancelledError:
                out.put(NetworkError("The ring was closed"))
                raise
            except BaseException as error:  # noqa: BLE001 - handed to the thread that iterates
                out.put(error)

        job = self.submit(pump())
        try:
            while (item := out.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item[0]
        finally:
            job.cancel()

    def abandon(self, tell: Callable[[], None], job: Future[Any]) -> None:
        """For an owner that was dropped: call ``tell`` on the loop, and end loop and thread once ``job`` has ended.

        It neither waits nor takes a lock: a garbage collector may call it, in any thread and at any moment.
        """
        if self.forked:
            return
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(_end_after, tell, job, self._stop)
        warnings.warn("A ring was dropped without close(); its stages are told to stop", ResourceWarning, stacklevel=2)

    def close(self) -> None:
        """Cancel what runs, end the loop and the thread; safe to call twice."""
        if self.forked:
            return
        with self._lock:
            if not self._closed:
                self._closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


async def _stay(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    stop = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()


def _end_after(tell: Callable[[], None], job: Future[Any], stop: asyncio.Event) -> None:
    """Runs on the loop, as does what it leaves to be called at the job's end."""
    job.add_done_callback(lambda _: stop.set())
    tell()
