"""A ring whose head or stage is cancelled at a random moment, once or twice, leaves nothing of it behind.

``SPLITLM_TEST_SEEDS`` sets how many random moments there are (4 by default).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import pytest

from splitlm.core.errors import SplitlmError
from splitlm.node.join import run_stage
from splitlm.node.ring import RingHost
from splitlm.node.settings import RingSettings
from tests.faults.scene import HOST, free_ports, nothing_left, settings

SEEDS = int(os.environ.get("SPLITLM_TEST_SEEDS", "4"))

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_ring_that_is_cancelled_anywhere_leaves_nothing(seed: int, stories: Path) -> None:
    chance = random.Random(seed)

    async def moment(turns: int) -> None:
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.2)
        else:
            for _ in range(chance.randrange(turns)):
                await asyncio.sleep(0)

    async def main() -> None:
        port = free_ports(1)[0]
        options = {
            "model": str(stories),
            "stages": 3,
            "threads": 1,
            "listen": (HOST, port),
            "token": "t",
            "deadline_s": 1.0,
        }
        head = RingHost(RingSettings(folder=stories, **options))  # type: ignore[arg-type]
        tasks = [asyncio.create_task(head.serve())]
        tasks += [asyncio.create_task(run_stage(settings(port, deadline_s=1.0))) for _ in range(2)]
        await moment(400)
        for _ in range(chance.choice([1, 2])):
            chance.choice(tasks).cancel()
            await moment(40)
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(asyncio.all_tasks()) == 1
        strange = [end for end in ended if end and not isinstance(end, SplitlmError | asyncio.CancelledError)]
        assert not strange

    with nothing_left():
        asyncio.run(main())
