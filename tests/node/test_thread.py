"""An event loop in a thread: nobody waits for ever, whoever closes it and whenever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from splitlm.core.errors import NetworkError
from splitlm.node.thread import LoopThread


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
