"""All roles of a training run in this process: for objectives of one's own, which no other process would know.

Parties share one compute thread, since dropout draws from the process's own generator; their links are real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from splitlm.bus.memory import MemoryHub
from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.core.shape import Role
from splitlm.model.runner import Runner
from splitlm.node.ending import leave
from splitlm.node.party import PartySettings, run_party
from splitlm.node.partylinks import LinkSettings
from splitlm.node.trainlead import LeadSettings, lead

HERE = "127.0.0.1"


async def train_in_room(settings: LeadSettings, threads: int = 1) -> None:
    """Run everything here, until it is done.

    Args:
        settings: of the coordinator; its objectives are every party's.
        threads: intra-op threads of the one compute thread.

    Raises:
        SplitlmError: the run ended early.
    """
    config, hub, runner = settings.config, MemoryHub(), Runner(threads)
    links = LinkSettings(
        host=HERE,
        token=settings.token,
        deadline_s=settings.deadline_s,
        pool_bytes=config.learning.u_shape.pool_bytes,
    )
    counts: list[tuple[Role, int]] = [("owner", config.server.owners), ("worker", config.server.workers)]
    try:
        async with asyncio.TaskGroup() as group:
            for role, count in counts:
                for number in range(count):
                    party = PartySettings(
                        role, config, settings.resolve, links, folder=settings.folder, objectives=settings.objectives
                    )
                    group.create_task(_told(run_party(party, hub.join(f"{role}{number}", HERE), runner)))
            await lead(replace(settings, states=(HERE, 0), advertise=HERE), hub)
    except* SplitlmError as errors:
        raise first_error(errors) from None
    finally:
        await leave(hub.close, partial(asyncio.to_thread, runner.close, 10.0))


async def _told(party: Coroutine[Any, Any, None]) -> None:
    """What a party fails with it has told the coordinator, who ends the run or goes on without it."""
    try:
        await party
    except NetworkError:
        return
