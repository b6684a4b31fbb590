"""Who says that it is at work is waited for anew; who says nothing is not."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from splitlm.bus.memory import MemoryHub
from splitlm.coordinator.orders import Aggregator, Orders
from splitlm.coordinator.training import Training
from splitlm.core import messages, training
from splitlm.core.errors import PeerMissingError
from splitlm.core.shape import find_shape


@pytest.mark.parametrize("working", [True, False])
def test_a_long_validation_is_not_taken_for_a_dead_peer(working: bool) -> None:
    async def main() -> bool:
        hub = MemoryHub()
        orders = Orders(find_shape("two-stage"), owners=1, workers=1, rounds=1, settings={}, run="r")
        of = Training(hub, orders, cast(Aggregator, SimpleNamespace(busy=False, jobs=0)))
        spoke = hub.join("owner")
        await spoke.send(training.Register("owner", "owner"))
        await of.hear(5.0, "it to register")

        async def owner() -> None:
            for _ in range(4):
                await asyncio.sleep(0.5)
                if working:
                    await spoke.send(training.Working(0))
            await spoke.send(training.Notify(0, 1, 0.0, 1))

        async with asyncio.TaskGroup() as group:
            group.create_task(owner())
            try:
                _, said = await of.hear(1.25, "it to validate")
            except PeerMissingError:
                return False
            return isinstance(said, training.Notify)

    assert asyncio.run(main()) is working


def test_a_worker_with_a_weight_that_is_none_is_turned_away_and_others_are_waited_for() -> None:
    async def main() -> None:
        hub, heard = MemoryHub(), list[str]()
        orders = Orders(find_shape("two-stage"), owners=1, workers=1, rounds=1, settings={}, run="r")
        of = Training(hub, orders, cast(Aggregator, SimpleNamespace(busy=False, jobs=0)), say=heard.append)
        wrong, right = hub.join("wrong"), hub.join("right")
        await wrong.send(training.Register("worker", "wrong", weight=-1.0))
        await right.send(training.Register("worker", "right", weight=2.0))
        member, _ = await of.hear(5.0, "one to register")
        assert (member.who, member.name, member.weight) == (("worker", 0), "right", 2.0)
        said = await wrong.receive()
        assert isinstance(said, messages.Stop) and "--compute-weight is -1.0" in said.reason
        assert heard == [f"wrong is turned away: {said.reason}", "worker 0 (right) is here"]

    asyncio.run(main())


@pytest.mark.parametrize("worked", [True, False])
def test_an_average_that_has_only_just_ended_is_waited_for_anew(worked: bool) -> None:
    """It takes a while to reach the parties that wait for it."""

    async def main() -> bool:
        hub, aggregator = MemoryHub(), SimpleNamespace(busy=worked, jobs=0)
        orders = Orders(find_shape("two-stage"), owners=1, workers=1, rounds=1, settings={}, run="r")
        of = Training(hub, orders, cast(Aggregator, aggregator))
        spoke = hub.join("owner")
        await spoke.send(training.Register("owner", "owner"))
        await of.hear(5.0, "it to register")

        async def averages() -> None:
            await asyncio.sleep(0.5)
            aggregator.busy, aggregator.jobs = False, int(worked)
            await asyncio.sleep(1.0)
            await spoke.send(training.Saved(0))

        async with asyncio.TaskGroup() as group:
            group.create_task(averages())
            try:
                _, said = await of.hear(1.0, "it to take the average")
            except PeerMissingError:
                return False
            return isinstance(said, training.Saved)

    assert asyncio.run(main()) is worked
