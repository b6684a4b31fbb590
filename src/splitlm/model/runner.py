"""The one thread of a process that runs the model; the event loop hands it work and gets results back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from splitlm.core.errors import SplitlmError

T = TypeVar("T")
NICE = 10
_Job = tuple[Callable[..., Any], tuple[Any, ...], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class Runner:
    """A compute thread. Jobs run one after the other, in the order in which they were handed over.

    Args:
        threads: intra-op threads; set in the compute thread too, since OpenMP keeps the number per thread. 0 leaves it.
        background: a thread of low priority and one intra-op thread, for work that must not disturb the compute thread.
    """

    def __init__(self, threads: int = 0, *, background: bool = False) -> None:
        self._threads = 0 if background else threads
        self._background = background
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._handing_over = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(
            target=self._work, name="splitlm-loader" if background else "splitlm-compute", daemon=True
        )
        self._thread.start()

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work(*args)`` on the compute thread; its result, or the error it raised.

        A job whose caller was cancelled runs all the same: stages change state in jobs.

        Raises:
            SplitlmError: the thread was closed before the job's turn.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._handing_over:  # no job comes behind the last one
            if self._closed:
                raise _closed()
            self._jobs.put((work, args, loop, future))
        return cast(T, await future)

    def close(self, timeout: float = 30.0) -> None:
        """Let the job at hand finish, fail the others, end the thread."""
        with self._handing_over:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _work(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        if self._background:
            with contextlib.suppress(AttributeError, OSError):  # where threads have priorities of their own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        while (job := self._jobs.get()) is not None:
            work, args, loop, future = job
            result: Any = None
            error: BaseException | None = None
            if self._closed:
                error = _closed()
            else:
                try:
                    result = work(*args)
                except BaseException as raised:  # noqa: BLE001 - handed to the caller, who awaits it
                    error = raised
            try:
                loop.call_soon_threadsafe(_settle, future, result, error)
            except RuntimeError:
                pass  # the loop is closed: nobody waits for this one any more
            del job, work, args, future, result, error


def _closed() -> SplitlmError:
    return SplitlmError("The compute thread was closed before this job ran", expected="jobs before close()")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, StopIteration):  # which no future can carry
        wrapped = RuntimeError("the job raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
