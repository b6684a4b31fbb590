"""One compute thread: jobs in order, errors handed over, nobody left waiting."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from splitlm.core.errors import SplitlmError, UsageError
from splitlm.model.runner import MAX_THREADS, Runner


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


@pytest.mark.parametrize("threads", [-1, MAX_THREADS + 1, 2**70, 1.5])
def test_a_number_of_threads_that_no_machine_has_starts_nothing(threads: int) -> None:
    before = threading.active_count()
    with pytest.raises(UsageError, match=r"^--threads: .*Expected a whole number from 0 to"):
        Runner(threads)
    assert threading.active_count() == before


def test_where_the_thread_cannot_begin_every_job_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: neither those that were there before it failed, nor those that come later."""

    def fails(_: int) -> None:
        raise ValueError("Overflow when unpacking long")

    monkeypatch.setattr(torch, "set_num_threads", fails)
    runner = Runner(2)

    async def main() -> None:
        async with asyncio.timeout(10):
            for _ in range(3):
                with pytest.raises(SplitlmError, match=r"could not begin .*Overflow.*--threads"):
                    await runner.run(lambda: 7)

    asyncio.run(main())
    runner.close(5)
    assert not any(thread.name == "splitlm-compute" for thread in threading.enumerate())


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


class Lines:
    """A source: single bytes from a socket."""

    def __init__(self) -> None:
        self.there, self.here = socket.socketpair()
        self.here.setblocking(False)
        self.reads = 0
        self.wake: Callable[[], None] = lambda: None
        self.hidden = False

    def fileno(self) -> int:
        return -1 if self.hidden else self.here.fileno()

    def attach(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def read(self) -> bytes | None:
        self.reads += 1
        if self.hidden:
            return None
        try:
            data = self.here.recv(1)
        except BlockingIOError:
            return None
        if not data:
            raise SplitlmError("the end")
        return data

    def close(self) -> None:
        self.there.close()
        self.here.close()


@pytest.fixture
def lines() -> Iterator[Lines]:
    source = Lines()
    yield source
    source.close()


def test_items_are_taken_in_order_on_the_compute_thread_until_one_gives_something(lines: Lines) -> None:
    runner = Runner()
    seen: list[bytes] = []
    idents: set[int] = set()

    def take(item: bytes) -> str | None:
        seen.append(item)
        idents.add(threading.get_ident())
        return "done" if item == b"." else None

    async def main() -> None:
        lines.there.send(b"ab.cd.")
        assert await asyncio.wait_for(runner.listen(lines, take), 10) == "done"
        assert seen == [b"a", b"b", b"."]
        assert await runner.run(threading.get_ident) in idents
        assert seen == [b"a", b"b", b"."]  # nothing is taken while nobody listens
        assert await asyncio.wait_for(runner.listen(lines, take), 10) == "done"

    asyncio.run(main())
    runner.close()
    assert b"".join(seen) == b"ab.cd." and len(idents) == 1


def test_jobs_go_first_and_the_thread_does_not_spin(lines: Lines) -> None:
    runner = Runner()
    order: list[object] = []
    go_on = threading.Event()

    def take(item: bytes) -> bytes | None:
        order.append(item)
        return item if item == b"." else None

    async def main() -> None:
        listening = asyncio.ensure_future(runner.listen(lines, take))
        for i in range(3):  # each finds the thread waiting for its source
            await asyncio.wait_for(runner.run(order.append, i), 10)
        await asyncio.sleep(0.05)
        assert lines.reads < 20
        slow = asyncio.ensure_future(runner.run(go_on.wait, 10))
        await asyncio.sleep(0.01)
        lines.there.send(b".")
        late = asyncio.ensure_future(runner.run(order.append, "job"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait_for(asyncio.gather(slow, late, listening), 10)

    asyncio.run(main())
    runner.close()
    assert order == [0, 1, 2, "job", b"."]


def test_a_source_that_cannot_be_waited_for_wakes_the_thread_itself(lines: Lines) -> None:
    runner = Runner()

    async def main() -> None:
        lines.hidden = True
        lines.there.send(b"x")
        listening = asyncio.ensure_future(runner.listen(lines, bytes))
        await runner.run(int)
        await asyncio.sleep(0.05)
        assert lines.reads < 20 and not listening.done()
        lines.hidden = False
        lines.wake()
        assert await asyncio.wait_for(listening, 10) == b"x"

    asyncio.run(main())
    runner.close()


def test_the_end_of_a_source_and_an_error_in_taking_reach_the_listener(lines: Lines) -> None:
    runner = Runner()

    async def main() -> None:
        lines.there.send(b"x")
        with pytest.raises(ZeroDivisionError):
            await asyncio.wait_for(runner.listen(lines, lambda item: 1 / (len(item) - 1)), 10)
        listening = asyncio.ensure_future(runner.listen(lines, bytes))
        await runner.run(int)
        lines.there.close()  # while the thread waits
        with pytest.raises(SplitlmError, match="the end"):
            await asyncio.wait_for(listening, 10)
        assert await runner.run(lambda: 7) == 7

    asyncio.run(main())
    runner.close()


def test_a_cancelled_listener_takes_nothing_more(lines: Lines) -> None:
    runner = Runner()
    seen: list[bytes] = []

    async def main() -> None:
        listening = asyncio.ensure_future(runner.listen(lines, seen.append))
        await runner.run(int)
        listening.cancel()
        await asyncio.wait({listening})
        lines.there.send(b"x")
        await runner.run(int)
        assert seen == []
        assert await asyncio.wait_for(runner.listen(lines, bytes), 10) == b"x"

    asyncio.run(main())
    runner.close()


def test_closing_fails_the_listener_and_wakes_the_thread(lines: Lines) -> None:
    runner = Runner()

    async def main() -> None:
        listening = asyncio.ensure_future(runner.listen(lines, bytes))
        await runner.run(int)
        await asyncio.to_thread(runner.close, 10)
        with pytest.raises(SplitlmError, match="closed before"):
            await asyncio.wait_for(listening, 10)
        with pytest.raises(SplitlmError, match="closed before"):
            await runner.listen(lines, bytes)

    asyncio.run(main())
    assert not runner._thread.is_alive()


def _raise(error: BaseException) -> None:
    raise error


def test_a_listener_that_is_cancelled_before_the_thread_is_closed_leaves_no_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent:
        def fileno(self) -> int:
            return -1

        def attach(self, wake: object) -> None:
            pass

        def read(self) -> None:
            return None

    async def main() -> None:
        runner = Runner()
        block = threading.Event()
        task = asyncio.create_task(runner.listen(Silent(), lambda item: None))
        await runner.run(lambda: None)
        busy = asyncio.ensure_future(runner.run(block.wait, 5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        closing = asyncio.create_task(asyncio.to_thread(runner.close))
        await asyncio.sleep(0.1)
        block.set()
        await asyncio.gather(busy, closing, return_exceptions=True)
        await asyncio.sleep(0.1)

    asyncio.run(main())
    gc.collect()
    assert not [record for record in caplog.records if "never retrieved" in record.getMessage()]
