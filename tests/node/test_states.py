"""What comes of states on their way when somebody goes: nobody gets half a state, an old sum, or none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import torch

from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.finetune import transfer
from splitlm.finetune.transfer import State, receive_state, send_state
from splitlm.link.memory import pair
from splitlm.model.runner import Runner
from splitlm.node.aggregator import StateHub
from splitlm.node.states import States
from splitlm.wire.channel import Channel
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims


class Arrivals:
    """A listener to which tests bring their channels."""

    host, port = "memory", 0

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Channel] = asyncio.Queue()

    async def accept(self) -> Channel:
        return await self.queue.get()

    async def close(self) -> None:
        return


def claims(role: str, place: int) -> Claims:
    return Claims(node=f"{role} {place}", version="1", protocol=PROTOCOL, role=role, place=place)


def hub_test(work: Callable[[StateHub, Callable[[str, int], Channel], list[SplitlmError]], Awaitable[None]]) -> None:
    async def main() -> None:
        runner, arrivals, failed = Runner(), Arrivals(), list[SplitlmError]()
        hub = StateHub(arrivals, runner, None, "factors", failed.append)  # type: ignore[arg-type]

        def join(role: str, place: int) -> Channel:
            mine, its = pair(claims(role, place), claims("aggregator", 0), purpose="state")
            arrivals.queue.put_nowait(its)
            return mine

        try:
            async with asyncio.timeout(20):
                await work(hub, join, failed)
        finally:
            await hub.close()
            runner.close()

    asyncio.run(main())


def gradient(seq: int, value: float) -> State:
    return State("gradient", 0, seq, 0, {"w": torch.full((2,), value)})


def update(value: float, samples: int = 1) -> State:
    return State("update", 0, 0, samples, {"w": torch.full((2,), value)})


def test_gradients_of_an_attempt_that_was_aborted_are_in_no_later_sum() -> None:
    async def work(hub: StateHub, join: Any, failed: list[SplitlmError]) -> None:
        one, two = join("worker", 0), join("worker", 1)
        await hub.expect([("worker", 0), ("worker", 1)])
        await send_state(one, gradient(1, 100.0))  # the other one never gets that far
        await send_state(one, gradient(2, 1.0))
        await asyncio.sleep(0.05)
        await send_state(two, gradient(1, 100.0))  # late
        await send_state(two, gradient(2, 2.0))
        for channel in (one, two):
            came = await receive_state(channel)
            assert came.window == 2 and came.tensors["w"].tolist() == [3.0, 3.0]
        assert not hub._gradients and not failed

    hub_test(work)


def test_a_lost_worker_is_waited_for_by_no_sum_and_its_own_is_in_none() -> None:
    async def work(hub: StateHub, join: Any, failed: list[SplitlmError]) -> None:
        one, two = join("worker", 0), join("worker", 1)
        await hub.expect([("worker", 0), ("worker", 1)])
        await send_state(two, gradient(1, 100.0))
        await asyncio.sleep(0.05)
        await hub.without(("worker", 1))
        assert not hub._gradients
        await send_state(one, gradient(2, 1.0))
        assert (await receive_state(one)).tensors["w"].tolist() == [1.0, 1.0]
        join("worker", 1)  # nobody comes back under the number of one that is lost
        await asyncio.sleep(0.05)
        assert ("worker", 1) not in hub._channels and not failed

    hub_test(work)


@pytest.mark.parametrize("sent", [False, True])
def test_an_average_is_of_those_that_are_left(sent: bool) -> None:
    async def work(hub: StateHub, join: Any, failed: list[SplitlmError]) -> None:
        members = [("owner", 0), ("owner", 1), ("owner", 2)]
        one, two, three = (join("owner", n) for n in range(3))
        await hub.begin(0, members)  # type: ignore[arg-type]
        if sent:
            await send_state(three, update(100.0))
        await send_state(one, update(1.0, 1))
        await asyncio.sleep(0.05)
        await hub.without(("owner", 2))
        await send_state(two, update(4.0, 2))
        for channel in (one, two):
            assert (await receive_state(channel)).tensors["w"].tolist() == [3.0, 3.0]
        assert await hub.complete(0, {}) == {("owner", 0), ("owner", 1)} and not failed

    hub_test(work)


def test_who_brings_the_last_state_and_goes_leaves_nobody_waiting() -> None:
    """Its reader ends with it; the average that its state made possible still reaches the others."""

    async def work(hub: StateHub, join: Any, failed: list[SplitlmError]) -> None:
        one, two = join("owner", 0), join("owner", 1)
        await hub.begin(0, [("owner", 0), ("owner", 1)])
        await send_state(one, update(1.0))
        await asyncio.sleep(0.05)
        begun, go = asyncio.Event(), asyncio.Event()
        run = hub._runner.run

        async def slow(*args: Any) -> Any:
            begun.set()
            await go.wait()
            return await run(*args)

        hub._runner.run = slow  # type: ignore[method-assign]
        await send_state(two, update(3.0))
        await begun.wait()
        await hub.without(("owner", 1))
        go.set()
        assert (await receive_state(one)).tensors["w"].tolist() == [2.0, 2.0]
        assert not failed

    hub_test(work)


def test_an_exchange_that_is_broken_off_leaves_no_half_state_in_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 64)

    async def main() -> None:
        mine, its = pair(claims("worker", 0), claims("aggregator", 0), purpose="state")
        send = mine.send

        async def slow(*frame: Any) -> None:
            await asyncio.sleep(0)
            await send(*frame)

        monkeypatch.setattr(mine, "send", slow)
        states = States(mine)
        large = State("gradient", 0, 1, 0, {f"w{i}": torch.ones(64) for i in range(2000)})
        broken = asyncio.create_task(states.exchange(large))
        await asyncio.sleep(0.001)
        broken.cancel()
        following = asyncio.create_task(states.exchange(gradient(2, 1.0)))
        async with asyncio.timeout(20):
            assert (await receive_state(its)).window == 1
            assert (await receive_state(its)).window == 2
            await send_state(its, gradient(1, 9.0))  # what comes of the one that was broken off
            await send_state(its, gradient(2, 5.0))
            assert (await following)["w"].tolist() == [5.0, 5.0]
            lost = asyncio.create_task(states.exchange(gradient(3, 1.0)))
            await asyncio.sleep(0.01)
            await its.close()
            with pytest.raises(NetworkError):
                await lost
            assert states.lost is not None
        await states.close()
        await mine.close()

    asyncio.run(main())
