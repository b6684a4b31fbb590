"""An end is taken whole, whatever its steps do and however often its task is cancelled meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from splitlm.node.ending import leave


def test_steps_come_in_order_and_each_whatever_became_of_the_one_before() -> None:
    taken: list[str] = []

    async def first() -> None:
        taken.append("first")
        raise OSError("lost")

    async def second() -> None:
        taken.append("second")

    with pytest.raises(OSError, match="lost"):
        asyncio.run(leave(first, second))
    assert taken == ["first", "second"]


def test_an_error_of_a_step_does_not_take_the_place_of_a_cancellation() -> None:
    async def fails() -> None:
        await asyncio.sleep(0.01)
        raise OSError("lost")

    async def main() -> None:
        task = asyncio.create_task(leave(fails))
        await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert isinstance(caught.value.__cause__, OSError)

    asyncio.run(main())


@pytest.mark.parametrize("turns", range(8))
def test_a_task_that_is_cancelled_again_meanwhile_still_leaves_nothing(turns: int) -> None:
    held = {"thread", "links", "port"}

    async def give_back(what: str) -> None:
        await asyncio.sleep(0)
        await asyncio.sleep(0.001)
        held.discard(what)

    async def hold() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await leave(*(lambda what=what: give_back(what) for what in sorted(held)))  # type: ignore[misc]

    async def main() -> None:
        task = asyncio.create_task(hold())
        await asyncio.sleep(0)
        task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not held
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(main())
