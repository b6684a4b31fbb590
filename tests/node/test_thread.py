"""An event loop in a thread: nobody waits for ever, whoever closes it and whenever."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from splitlm.core.errors import NetworkError
from splitlm.node.thread import LoopThread
from tests.forked import forked


def test_results_and_errors_come_back() -> None:
    thread = LoopThread("splitlm-test")

    async def good() -> str:
        return threading.current_thread().name

    async def bad() -> None:
        raise KeyError("x")

    assert thread.call(good()) == "splitlm-test"
    with pytest.raises(KeyError):
        thread.call(bad())
    thread.close()
    thread.close()
    assert not any(t.name == "splitlm-test" for t in threading.enumerate())


def test_after_the_end_there_is_an_error_of_ours_and_no_unawaited_coroutine(recwarn: pytest.WarningsRecorder) -> None:
    thread = LoopThread("splitlm-test")
    thread.close()
    with pytest.raises(NetworkError, match="not open"):
        thread.call(asyncio.sleep(0))
    assert not recwarn.list


def test_whoever_waits_when_it_closes_is_told() -> None:
    thread = LoopThread("splitlm-test")
    cleaned = threading.Event()

    async def long() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned.set()

    job = thread.submit(long())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.call, asyncio.Event().wait())
        thread.close()
        with pytest.raises(NetworkError, match="not open"):
            waiting.result(10)
    with pytest.raises(CancelledError):
        job.result(10)
    assert cleaned.is_set()


def test_work_handed_in_while_it_closes_is_never_lost() -> None:
    """Many threads hand in at the moment of the end: each call returns, with a result or an error of ours."""

    async def one() -> int:
        await asyncio.sleep(0)
        return 1

    for _ in range(20):
        thread = LoopThread("splitlm-test")
        start = threading.Barrier(5)

        def hammer(thread: LoopThread = thread, start: threading.Barrier = start) -> int:
            start.wait()
            done = 0
            try:
                for _ in range(200):
                    done += thread.call(one())
            except NetworkError:
                return done
            return done

        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(hammer) for _ in range(4)]
            start.wait()
            thread.close()
            assert all(0 <= job.result(20) <= 200 for job in jobs)


class _Owner:
    """Holds a thread and a job of it, as a ring does."""

    def __init__(self) -> None:
        self.thread = LoopThread("splitlm-test")
        self.stop = asyncio.Event()
        self.ended = threading.Event()
        self.job = self.thread.submit(_serve(self.stop, self.ended))
        weakref.finalize(self, self.thread.abandon, self.stop.set, self.job)


async def _serve(stop: asyncio.Event, ended: threading.Event) -> None:
    await stop.wait()
    await asyncio.sleep(0.01)
    ended.set()


def _gone(name: str) -> bool:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(10)
    return not any(thread.name == name for thread in threading.enumerate())


def test_a_dropped_owners_job_ends_in_order_and_then_its_thread() -> None:
    owner = _Owner()
    ended = owner.ended
    with pytest.warns(ResourceWarning, match="without close"):
        del owner
        gc.collect()
    assert ended.wait(10)
    assert _gone("splitlm-test")


def test_the_loops_own_thread_may_collect_the_owner() -> None:
    """A garbage collector runs in whatever thread makes an object: it must not wait there for that thread."""
    owner = [_Owner()]
    ended, thread = owner[0].ended, owner[0].thread

    async def drop() -> None:
        owner.clear()
        gc.collect()

    with pytest.warns(ResourceWarning, match="without close"):
        thread.call(drop())
    assert ended.wait(10)
    assert _gone("splitlm-test")


def test_a_forked_child_is_told_that_the_loop_is_its_parents() -> None:
    """Its copy has no such thread: it would wait for ever. Nor does closing there end anything here."""
    thread = LoopThread("splitlm-test")

    async def letters() -> AsyncIterator[str]:
        yield "a"

    def child() -> None:
        for use in (lambda: thread.call(asyncio.sleep(0)), lambda: list(thread.iterate(letters()))):
            with pytest.raises(NetworkError, match="forked from it"):
                use()
        thread.abandon(lambda: None, Future())
        thread.close()

    assert forked(child) == 0
    assert list(thread.iterate(letters())) == ["a"]
    thread.close()
