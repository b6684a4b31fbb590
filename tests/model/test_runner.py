"""One compute thread: jobs in order, errors handed over, nobody left waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest
import torch

from splitlm.core.errors import SplitlmError
from splitlm.model.runner import Runner


def test_jobs_run_in_order_on_one_other_thread() -> None:
    runner = Runner()
    done: list[int] = []

    async def main() -> list[int]:
        return await asyncio.gather(*(runner.run(job, i) for i in range(50)))

    def job(i: int) -> int:
        done.append(i)
        return threading.get_ident()

    idents = asyncio.run(main())
    runner.close()
    assert done == list(range(50))
    assert len(set(idents)) == 1 and idents[0] != threading.get_ident()


def test_the_number_of_threads_is_that_of_the_compute_thread() -> None:
    before = torch.get_num_threads()
    runner = Runner(2)
    assert asyncio.run(runner.run(torch.get_num_threads)) == 2
    runner.close()
    torch.set_num_threads(before)
    same = Runner()
    assert asyncio.run(same.run(torch.get_num_threads)) == before
    same.close()


@pytest.mark.parametrize("error", [ValueError("x"), SplitlmError("x"), SystemExit(3), GeneratorExit()])
def test_errors_reach_the_caller_and_the_thread_goes_on(error: BaseException) -> None:
    runner = Runner()

    async def main() -> int:
        with pytest.raises(type(error)):
            await runner.run(_raise, error)
        return await runner.run(lambda: 7)

    assert asyncio.run(main()) == 7
    runner.close()


def test_an_interrupt_in_a_job_ends_the_loop_and_not_the_thread() -> None:
    runner = Runner()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(runner.run(_raise, KeyboardInterrupt()))
    assert asyncio.run(runner.run(lambda: 7)) == 7
    runner.close()


def test_an_error_that_no_future_can_carry_does_not_hang() -> None:
    runner = Runner()

    async def main() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(runner.run(next, iter(())), 10)

    asyncio.run(main())
    runner.close()


def test_close_lets_the_job_at_hand_finish_and_fails_those_that_wait() -> None:
    runner = Runner()
    started, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        started.set()
        assert go_on.wait(10)
        return "finished"

    async def main() -> list[object]:
        jobs = [asyncio.ensure_future(runner.run(slow)), *(asyncio.ensure_future(runner.run(int)) for _ in range(3))]
        await asyncio.to_thread(started.wait, 10)
        closing = asyncio.create_task(asyncio.to_thread(runner.close))
        while not runner._closed:
            await asyncio.sleep(0)
        go_on.set()
        out = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 10)
        await closing
        return list(out)

    first, *others = asyncio.run(main())
    assert first == "finished"
    assert len(others) == 3
    assert all(isinstance(e, SplitlmError) and "closed before" in str(e) for e in others)
    assert not runner._thread.is_alive()


def test_a_job_after_close_is_refused_at_once() -> None:
    runner = Runner()
    runner.close()
    runner.close()
    with pytest.raises(SplitlmError, match="closed before"):
        asyncio.run(asyncio.wait_for(runner.run(int), 10))


def test_a_job_may_close_its_own_thread() -> None:
    runner = Runner()
    asyncio.run(asyncio.wait_for(runner.run(runner.close), 10))
    runner._thread.join(10)
    assert not runner._thread.is_alive()


def test_a_loop_that_ended_before_its_result_leaves_the_thread_to_others() -> None:
    runner = Runner()
    started, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        started.set()
        go_on.wait(10)

    async def leave() -> None:
        task = asyncio.ensure_future(runner.run(slow))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()

    asyncio.run(leave())
    go_on.set()
    assert asyncio.run(asyncio.wait_for(runner.run(lambda: 7), 10)) == 7
    runner.close()


def test_a_cancelled_caller_does_not_stop_what_follows() -> None:
    runner = Runner()
    ran: list[str] = []

    async def main() -> None:
        first = asyncio.ensure_future(runner.run(time.sleep, 0.01))
        second = asyncio.ensure_future(runner.run(ran.append, "second"))
        await asyncio.sleep(0)
        second.cancel()
        await first
        await runner.run(ran.append, "third")

    asyncio.run(main())
    runner.close()
    assert ran == ["second", "third"]


def test_results_are_not_kept_alive() -> None:
    """The thread waits for its next job with no reference to the last one's result."""
    import gc
    import weakref

    runner = Runner()
    made: list[Callable[[], object]] = []

    class Big:
        pass

    def job() -> Big:
        big = Big()
        made.append(weakref.ref(big))
        return big

    async def main() -> None:
        await runner.run(job)
        await runner.run(int)

    asyncio.run(main())
    gc.collect()
    assert made[0]() is None
    runner.close()


def _raise(error: BaseException) -> None:
    raise error
