"""Coordinator and followers together, over a network that delays, reorders, repeats and loses messages."""

from __future__ import annotations

import asyncio
import random

from splitlm.coordinator.coordinator import Coordinator
from splitlm.coordinator.state import Decision
from splitlm.core import messages as m
from splitlm.core.cut import Cut, make_cut, shift
from splitlm.core.errors import NetworkError, UsageError
from splitlm.node.follower import Follower

NODES = (0, 1, 2)
BARRIERS = 8


class Holder:
    """Work that holds a cut; slow at times, and refusing at times."""

    def __init__(self, cut: Cut, rng: random.Random) -> None:
        self.cut, self._rng = cut, rng
        self.held = [cut]

    async def announced(self, cut: Cut) -> None:
        await asyncio.sleep(self._rng.uniform(0, 0.01))

    async def prepare(self, prepare: m.Prepare) -> None:
        await asyncio.sleep(self._rng.choice((0, 0, 0.005, 0.01)))
        if self._rng.random() < 0.1:
            raise UsageError("no room")

    async def commit(self, cut: Cut | None) -> None:
        await asyncio.sleep(self._rng.uniform(0, 0.005))
        self.cut = cut or self.cut
        self.held.append(self.cut)

    async def abort(self) -> None:
        await asyncio.sleep(0)

    async def finish(self) -> None:
        await asyncio.sleep(self._rng.uniform(0, 0.01))


async def play(seed: int, loss: float, timeout: float) -> tuple[int, int, bool]:
    """One ring for some barriers; how many were committed and aborted, and whether it stopped."""
    rng, loop = random.Random(seed), asyncio.get_running_loop()
    old = make_cut(60, (20, 40))
    works = {node: Holder(old, rng) for node in NODES}

    def carry(hear: object, *what: object, local: bool) -> None:
        if local:
            hear(*what)  # type: ignore[operator]
            return
        if rng.random() >= loss:
            for _ in range(1 + (rng.random() < 0.15)):
                loop.call_later(rng.uniform(0, 0.01), hear, *what)  # type: ignore[arg-type]

    async def send(node: int, message: m.Message) -> None:
        carry(followers[node].hear, message, local=node == 0)

    def sayer(node: int):  # type: ignore[no-untyped-def]
        async def say(message: m.Message) -> None:
            carry(lead.hear, node, message, local=node == 0)

        return say

    lead = Coordinator(send, NODES, cut=old, ctrl_timeout_s=timeout)
    followers = {node: Follower(sayer(node), works[node], node=node, ctrl_timeout_s=timeout) for node in NODES}
    tasks = {node: asyncio.create_task(follower.run()) for node, follower in followers.items()}
    committed, aborted, stopped = [old], 0, False
    try:
        for i in range(BARRIERS):
            move = rng.random() < 0.6
            cut = shift(lead.cut, rng.choice((1, 2)), rng.choice((1, -1))) if move else None
            if cut is not None and rng.random() < 0.5:
                await lead.announce(cut)
                await lead.staged(0.02)
            outcome = await lead.barrier(Decision("auto", cut) if cut else Decision())
            assert outcome.seq == i + 1 and outcome.cut == lead.cut
            if outcome.committed:
                committed.append(outcome.cut)
                assert outcome.cut == (cut or outcome.cut)
                assert {work.cut for work in works.values()} == {outcome.cut}, "all of it, or nothing"
            else:
                aborted += 1
                assert {work.cut for work in works.values()} == {committed[-1]}, "nothing of what was aborted"
    except NetworkError as error:
        stopped = True
        assert "Node" in str(error) and "in state '" in str(error)
        # Only the last decision may be in doubt, and only that one may be held by some.
        proposed = {cut} if cut is not None else set()
        assert {work.cut for work in works.values()} <= {committed[-1]} | proposed
    finally:
        for task in tasks.values():
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
    for work in works.values():
        epochs = [cut.epoch for cut in work.held]
        assert epochs == sorted(epochs), "epochs only grow"
    return len(committed) - 1, aborted, stopped


def test_no_loss_no_stop() -> None:
    async def main() -> list[tuple[int, int, bool]]:
        return await asyncio.gather(*(play(seed, 0.0, 30.0) for seed in range(6)))

    results = asyncio.run(main())
    assert all(committed + aborted == BARRIERS and not stopped for committed, aborted, stopped in results)
    assert sum(committed for committed, _, _ in results) > 10 and sum(aborted for _, aborted, _ in results) > 3


def test_with_loss_it_aborts_or_stops_and_never_applies_half() -> None:
    async def main() -> list[tuple[int, int, bool]]:
        return await asyncio.gather(*(play(seed, 0.04, 0.25) for seed in range(100, 112)))

    results = asyncio.run(main())
    assert any(stopped for _, _, stopped in results) and any(committed for committed, _, _ in results)
