"""The one thread of a process that runs the model; the event loop hands it work and gets results back.

Where what it works on comes from a socket, the thread can read that itself between jobs (``listen``): handing over from
the event loop means one more thread to wake, which costs more than the rest of a small frame's way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch

from splitlm.core.errors import SplitlmError, UsageError

T = TypeVar("T")
Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)
NICE = 10
MAX_THREADS = 1024
"""Intra-op threads that may be asked for: far more than a machine has cores, and few enough to be started."""
_ALLOCATORS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED", "bad_alloc")
"""How torch's allocators, which mostly raise a plain RuntimeError, say that there is nothing left."""
_Job = tuple[Callable[..., Any], tuple[Any, ...], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


def out_of_memory(error: BaseException, whose: str = "") -> SplitlmError | None:
    """The same in words where ``error`` says that memory ran out; None where it says something else.

    Args:
        whose: what the memory was for, where that is known: the words before "memory ran out".
    """
    text = " ".join(str(error).split())
    told = isinstance(error, RuntimeError) and any(words in text for words in _ALLOCATORS)
    if not told and not isinstance(error, MemoryError):
        return None
    found = f"{type(error).__name__}: {text[:240]}".rstrip(": ")
    return SplitlmError(
        f"{whose}: memory ran out ({found})" if whose else f"Memory ran out ({found})",
        expected="room for one step, and for the keys and values of all sessions",
        remedy="Use more stages, a smaller --prefill-chunk or fewer sessions at once, or raise the limit (ulimit -v)",
    )


async def memory_told(work: Awaitable[T]) -> T:
    """Await this on the loop; memory that ran out is said in words.

    Raises:
        SplitlmError: memory ran out; or whatever ``work`` raises.
    """
    try:
        return await work
    except (MemoryError, RuntimeError) as error:
        told = out_of_memory(error)
        if told is None:
            raise
        raise told from error


def check_threads(threads: int) -> int:
    """This number of intra-op threads, 0 for torch's choice.

    Raises:
        UsageError: no machine is asked for so many.
    """
    if type(threads) is not int or not 0 <= threads <= MAX_THREADS:
        raise UsageError(
            f"threads is {threads!r}", where="--threads", expected=f"a whole number from 0 to {MAX_THREADS}"
        )
    return threads


class Source(Protocol[Item_co]):
    """What the compute thread can read itself."""

    def fileno(self) -> int:
        """What to wait for; -1 while waiting for it is no use."""
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """``wake`` is to be called, from any thread, when ``read`` is worth a call though ``fileno`` did not say so."""
        ...

    def read(self) -> Item_co | None:
        """The next item that is here, or None; does not wait. What it raises ends the listening."""
        ...


@dataclass(frozen=True, eq=False)
class _Listening:
    source: Source[Any]
    take: Callable[[Any], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class Runner:
    """A compute thread. Jobs run one after the other, in the order in which they were handed over.

    Args:
        threads: intra-op threads; set in the compute thread too, since OpenMP keeps the number per thread. 0 leaves it.
        background: a thread of low priority and one intra-op thread, for work that must not disturb the compute thread.

    Raises:
        UsageError: so many threads are not to be had.
    """

    def __init__(self, threads: int = 0, *, background: bool = False) -> None:
        self._threads = 0 if background else check_threads(threads)
        self._background = background
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._handing_over = threading.Lock()
        self._closed = False
        self._listening: _Listening | None = None  # the compute thread's own
        self._bell: _Bell | None = None
        self._thread = threading.Thread(
            target=self._work, name="splitlm-loader" if background else "splitlm-compute", daemon=True
        )
        self._thread.start()

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run ``work(*args)`` on the compute thread; its result, or the error it raised.

        A job whose caller was cancelled runs all the same: stages change state in jobs.

        Raises:
            SplitlmError: the thread was closed before the job's turn, or memory ran out in it.
        """
        return cast(T, await self._hand_over(work, *args))

    async def listen(self, source: Source[Item], take: Callable[[Item], T | None]) -> T:
        """Let the compute thread read ``source`` and call ``take`` with each item, until that returns something.

        Jobs go first: the thread looks for one before each item. One source at a time; when the caller is cancelled,
        no further item is read once the one at hand is done.

        Raises:
            SplitlmError: the thread was closed, or memory ran out; or whatever ``source`` or ``take`` raised.
        """
        loop = asyncio.get_running_loop()
        listening = _Listening(source, take, loop, loop.create_future())
        with self._handing_over:
            if self._bell is None and not self._closed:
                self._bell = _Bell()
        source.attach(self._ring)
        try:
            await self._hand_over(self._begin, listening)
            return cast(T, await listening.future)
        finally:
            if not listening.future.done() or listening.future.cancelled():
                with contextlib.suppress(SplitlmError):
                    self._hand_over(self._end, listening).add_done_callback(_unawaited)

    def close(self, timeout: float = 30.0) -> None:
        """Let the job at hand finish, fail the others, end the thread."""
        with self._handing_over:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
                self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _hand_over(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        with self._handing_over:  # no job comes behind the last one
            if self._closed:
                raise _closed()
            self._jobs.put((work, args, loop, future))
        self._ring()
        return future

    def _ring(self) -> None:
        """There is a job, or something to read: wake the compute thread where it waits for a source."""
        bell = self._bell
        if bell is not None:
            bell.ring()

    def _begin(self, listening: _Listening) -> None:
        if self._listening is not None:
            raise RuntimeError("the compute thread already listens")
        self._listening = listening

    def _end(self, listening: _Listening) -> None:
        if self._listening is listening:
            self._listening = None

    def _next(self) -> _Job | None:
        """The next job. While there is none, items of the source are taken here."""
        while (listening := self._listening) is not None and self._bell is not None:
            if not self._jobs.empty():  # nobody else takes any
                return self._jobs.get()
            if not self._take(listening):
                self._bell.wait(listening.source.fileno())
        return self._jobs.get()

    def _take(self, listening: _Listening) -> bool:
        """Take one item; whether there was one, or an end."""
        result: Any = None
        error: BaseException | None = None
        try:
            item = listening.source.read()
            if item is None:
                return False
            result = listening.take(item)
            del item
        except BaseException as raised:  # noqa: BLE001 - handed to the caller, who awaits it
            error = _worded(raised)
        if result is not None or error is not None:
            self._listening = None
            _hand_back(listening.loop, listening.future, result, error)
        return True

    def _prepare(self) -> BaseException | None:
        """Make the thread what it is to be; what went wrong, for whoever has work for it."""
        try:
            if self._threads:
                torch.set_num_threads(self._threads)
            if self._background:
                with contextlib.suppress(AttributeError, OSError):  # where threads have priorities of their own
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        except BaseException as raised:  # noqa: BLE001 - handed to every caller, who would wait for ever else
            return _worded(raised)
        return None

    def _work(self) -> None:
        unfit = self._prepare()
        while (job := self._next()) is not None:
            work, args, loop, future = job
            result: Any = None
            error: BaseException | None = None
            if self._closed:
                error = _closed()
            elif unfit is not None:
                error = _unfit(unfit)
            else:
                try:
                    result = work(*args)
                except BaseException as raised:  # noqa: BLE001 - handed to the caller, who awaits it
                    error = _worded(raised)
            _hand_back(loop, future, result, error)
            del job, work, args, future, result, error
        if self._listening is not None:
            _hand_back(self._listening.loop, self._listening.future, None, _closed())
        bell, self._bell = self._bell, None
        if bell is not None:
            bell.close()


class _Bell:
    """Waits for a descriptor, and for other threads that ring."""

    def __init__(self) -> None:
        self._hears, self._rings = os.pipe()
        os.set_blocking(self._hears, False)
        os.set_blocking(self._rings, False)
        self._closed = False
        self._lock = threading.Lock()
        self._poll = select.poll()
        self._poll.register(self._hears, select.POLLIN)
        self._watched = -1

    def ring(self) -> None:
        """From any thread."""
        with self._lock, contextlib.suppress(BlockingIOError, InterruptedError):  # it rings already
            if not self._closed:
                os.write(self._rings, b"\0")

    def wait(self, descriptor: int) -> None:
        """Until something can be read from ``descriptor`` (-1: none), or somebody rang."""
        if descriptor != self._watched:
            if self._watched >= 0:
                self._poll.unregister(self._watched)
            if descriptor >= 0:
                self._poll.register(descriptor, select.POLLIN)
            self._watched = descriptor
        for ready, _ in self._poll.poll():
            if ready == self._hears:
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    while os.read(self._hears, 64):
                        pass

    def close(self) -> None:
        """Of the waiting thread."""
        with self._lock:
            self._closed = True
            os.close(self._hears)
            os.close(self._rings)


def _hand_back(
    loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any], result: Any, error: BaseException | None
) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for this one any more
        loop.call_soon_threadsafe(_settle, future, result, error)


def _worded(error: BaseException) -> BaseException:
    """The error that a caller is to see."""
    told = out_of_memory(error)
    if told is None:
        return error
    told.__cause__ = error
    return told


def _closed() -> SplitlmError:
    return SplitlmError("The compute thread was closed before this job ran", expected="jobs before close()")


def _unfit(cause: BaseException) -> SplitlmError:
    """Anew for every job, since an error that is raised twice keeps the frames of both."""
    error = SplitlmError(
        f"The compute thread could not begin ({type(cause).__name__}: {cause})",
        expected="a thread that torch can set up",
        remedy="Check --threads, and the limits of this machine",
    )
    error.__cause__ = cause
    return error


def _unawaited(future: asyncio.Future[Any]) -> None:
    """Nobody waits for this one: that the thread was closed before its turn is no news."""
    if not future.cancelled():
        future.exception()


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
