"""A whole training run as processes on this machine: the coordinator here, every party as a child."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from splitlm.bus.base import Hub
from splitlm.core.config import RunConfig
from splitlm.core.errors import PeerLostError, SplitlmError
from splitlm.link.local import LOOPBACK, loopback
from splitlm.node.ending import leave
from splitlm.node.guard import Guard
from splitlm.node.identity import node_name
from splitlm.node.processes import GRACE_S, HURRY_S, StageProcess, end_all
from splitlm.node.trainbus import open_rabbit, open_star
from splitlm.node.trainlead import LeadSettings, lead


@dataclass(frozen=True)
class LocalSettings:
    """How the parties of a local run are started.

    Attributes:
        config: the file of settings, which each party reads for itself.
        changes: ``--set`` arguments.
        logs: folder of their logs, or None.
        threads: intra-op threads of each party.
    """

    config: Path
    changes: Sequence[str] = ()
    logs: Path | None = None
    threads: int = 1


async def coordinate(
    settings: LeadSettings,
    listen: tuple[str, int],
    opened: Callable[[int], None] = lambda _: None,
    *,
    local: bool = False,
) -> None:
    """Be the coordinator of a run, whose parties come over TCP or meet it at the broker, as the settings say.

    Args:
        settings: of the run.
        listen: address of the star's control port; port 0 takes a free one. With a broker, the aggregator's.
        opened: told the control port, or 0 where parties go to the broker.
        local: whether all roles are on this machine.

    Raises:
        UsageError: there is no certificate where one is needed.
        SplitlmError: the run ended early; see ``lead``.
    """
    config = settings.config
    guard = Guard.of(config)
    hub: Hub
    if config.bus(local) == "star":
        tls = guard.wanted(listen[0], settings.advertise, *_tensors(config))
        hub = await open_star(node_name("coordinator"), listen, settings.token, guard, tls, opened)
        settings = replace(settings, tls=tls)
    else:
        hub = broker = await open_rabbit(config, LOOPBACK if local else settings.advertise)
        states = listen if local or not loopback(listen[0]) else (broker.host, listen[1])
        tls = guard.wanted(broker.host, states[0], *_tensors(config))
        settings = replace(settings, tls=tls, states=states)
    try:
        if config.bus(local) != "star":
            opened(0)
        await lead(settings, hub)
    finally:
        await hub.close()


def _tensors(config: RunConfig) -> list[str]:
    """Where tensors go, if that is not from party to party."""
    return [config.rabbit.address] if config.learning.u_shape.transport == "rabbitmq" else []


def train_here(settings: LeadSettings, local: LocalSettings) -> None:
    """Run everything on this machine, until it is done.

    Raises:
        SplitlmError: the run ended early, or a party could not be started.
    """
    asyncio.run(_train_here(replace(settings, token=settings.token or secrets.token_hex(16)), local))


async def _train_here(settings: LeadSettings, local: LocalSettings) -> None:
    children: list[StageProcess] = []
    failed: asyncio.Future[SplitlmError] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()
    settings = replace(settings, begun=begun.set)

    def opened(port: int) -> None:
        try:
            children.extend(_start(settings, local, port))
        except SplitlmError as error:
            failed.set_result(error)

    work = asyncio.create_task(coordinate(settings, (LOOPBACK, 0), opened, local=True))
    watch = asyncio.create_task(_early_end(children, begun))
    all_: set[asyncio.Future[Any]] = {work, watch, failed}
    try:
        await asyncio.wait(all_, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        if not work.done() and (error := watch.result()) is not None:
            raise error
        await work
    finally:
        for task in (work, watch):
            task.cancel()
        # Before all were here nobody has anything to save, and some do not even listen yet.
        grace_s = GRACE_S if begun.is_set() else HURRY_S
        await leave(
            partial(asyncio.gather, work, watch, return_exceptions=True),
            partial(asyncio.to_thread, end_all, children, grace_s),
        )


async def _early_end(children: Sequence[StageProcess], begun: asyncio.Event) -> SplitlmError | None:
    """The first party that fails before all were here: nobody else would tell. Later the coordinator hears of it."""
    while not begun.is_set():
        await asyncio.sleep(0.2)
        for child in children:
            if child.exit_code not in (None, 0) and (error := _failure(child)) is not None:
                await asyncio.sleep(1.0)  # where the coordinator heard of it, it ends the run
                return error if not begun.is_set() else await _never()
    return await _never()


def _failure(child: StageProcess) -> SplitlmError | None:
    """Why a party ended: in its own words, where it had some."""
    if (child.exit_code or 0) >= 0:
        return child.failure()
    return PeerLostError(
        f"The party's process {child.pid} {child.fate()} before the run began", remedy="Start it again"
    )


async def _never() -> SplitlmError | None:
    never: asyncio.Future[SplitlmError | None] = asyncio.get_running_loop().create_future()
    return await never


def _start(settings: LeadSettings, local: LocalSettings, port: int) -> list[StageProcess]:
    environment = {"SPLITLM_TOKEN": settings.token, "OMP_WAIT_POLICY": "PASSIVE"}
    started: list[StageProcess] = []
    server = settings.config.server
    roles = [("owner", 1, i) for i in range(server.owners)] + [("worker", 2, i) for i in range(server.workers)]
    try:
        for role, layer, number in roles:
            arguments = [str(local.config), "--layer-id", str(layer), "--tensor-host", LOOPBACK]
            arguments += ["--join", f"{LOOPBACK}:{port}"] if port else []
            arguments += ["--threads", str(local.threads), "--parent", str(os.getpid())]
            arguments += ["--folder", str(settings.folder)] if settings.folder is not None else []
            for change in local.changes:
                arguments += ["--set", change]
            log = local.logs / f"{role}-{number}.log" if local.logs else None
            started.append(StageProcess(arguments, log=log, environment=environment, verb="client"))
    except BaseException:
        end_all(started, grace=0)
        raise
    return started
