"""The coordinator's process in training: the bus, the one who decides, and the aggregator beside it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from splitlm.bus.base import Hub
from splitlm.coordinator.orders import Orders
from splitlm.coordinator.remote import Remote
from splitlm.coordinator.training import Training
from splitlm.core.config import RunConfig, resolved
from splitlm.core.errors import SplitlmError
from splitlm.finetune.objective import Objectives
from splitlm.finetune.recipe import Resolve
from splitlm.model.runner import Runner
from splitlm.node.aggregator import StateHub
from splitlm.node.diary import Diary
from splitlm.node.ending import leave
from splitlm.node.evaluation import Central
from splitlm.node.identity import aggregator_claims
from splitlm.node.keeper import Begun, Keeper, begin
from splitlm.node.ways import Door, Way, open_way
from splitlm.wire.handshake import Identity


@dataclass(frozen=True)
class LeadSettings:
    """What the coordinator is told by its user.

    Attributes:
        config: the run's settings.
        resolve: finds a model's directory.
        folder: of the run; None keeps nothing.
        resume: whether the run in ``folder`` is to be gone on with, from its last complete round.
        states: address of the aggregator's port; port 0 takes a free one.
        advertise: host of the aggregator that parties can reach, where it is not the one they reach the hub at.
        tls: whether the run's links are over TLS.
        token: join secret.
        deadline_s: how long to wait for parties.
        objectives: the table to look in, for the coordinator's own evaluation; None for ours.
        begun: told when all parties are here.
        say: takes one line of progress.
        record: takes what is known of each window and round.
    """

    config: RunConfig
    resolve: Resolve
    folder: Path | None = None
    resume: bool = False
    states: tuple[str, int] = ("127.0.0.1", 0)
    advertise: str = ""
    tls: bool = False
    token: str = ""
    deadline_s: float = 60.0
    objectives: Objectives | None = None
    begun: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda _: None
    record: Callable[[str, dict[str, Any]], None] = lambda _, __: None


async def lead(settings: LeadSettings, hub: Hub) -> Training:
    """Run a training; the parties come over the hub, which stays the caller's.

    Returns:
        What is known of the run at its end.

    Raises:
        SplitlmError: it ended early; see ``Training.run``.
    """
    runner = Runner(background=True)
    diary, run = Diary(None), secrets.token_hex(8)
    try:
        way = await open_way(settings.config, run, settings.tls)
        try:
            begun = await runner.run(
                partial(begin, settings.config, settings.resolve, settings.folder, resume=settings.resume)
            )
            diary = Diary(begun.folder, settings.record)
            if begun.resume >= 0:
                settings.say(f"going on after round {begun.resume + 1} of {settings.config.server.global_round}")
            keeper = Keeper(settings.config, settings.resolve, begun.folder, runner, settings.say)
            if settings.config.averages_at:
                return await _lead_alone(settings, hub, diary, keeper, _orders(settings, run, begun))
            return await _lead(settings, hub, runner, diary, keeper, way, _orders(settings, run, begun))
        finally:
            await way.close()
    finally:
        await leave(partial(asyncio.to_thread, runner.close, 10.0), partial(asyncio.to_thread, diary.close))


def _orders(settings: LeadSettings, run: str, begun: Begun) -> Orders:
    config = settings.config
    return Orders(
        shape=config.shape,
        owners=config.server.owners,
        workers=config.server.workers,
        rounds=config.server.global_round,
        settings=resolved(config) | {"security": {"tls": "on" if settings.tls else "off"}},
        run=run,
        averages=config.averages_at,
        first=begun.resume + 1,
        resume=begun.resume,
        stored=begun.stored,
        drifts=config.shape.agreed and config.learning.body_sync == "round",
        deadline_s=settings.deadline_s,
        timeout_s=config.learning.u_shape.timeout_seconds,
        validate=config.server.validation,
    )


async def _lead_alone(settings: LeadSettings, hub: Hub, diary: Diary, keeper: Keeper, orders: Orders) -> Training:
    """A worker averages: it writes the model and evaluates it, and what is kept here is each round's manifest."""
    remote = Remote(keeper.whole)
    training_ = Training(hub, orders, remote, say=settings.say, record=diary.record)

    async def found(_: int) -> dict[str, Any]:
        return dict(remote.found)

    remote.serve(training_)
    training_.begun = lambda _: settings.begun()
    training_.evaluate = found
    await training_.run()
    return training_


async def _lead(
    settings: LeadSettings, hub: Hub, runner: Runner, diary: Diary, keeper: Keeper, way: Way, orders: Orders
) -> Training:
    """The aggregator is beside the coordinator."""
    config = settings.config
    central = Central(config, settings.resolve, runner, settings.objectives)
    await central.open()
    failure: asyncio.Future[SplitlmError] = asyncio.get_running_loop().create_future()

    def failed(error: SplitlmError) -> None:
        if not failure.done():
            failure.set_result(error)

    place = Door("aggregator", 0, "state", *settings.states)
    identity = Identity(aggregator_claims(orders.run), settings.token)
    door = await way.listen(place, identity, expect_peer="a party")
    states = StateHub(door, runner, keeper, config.fine_tune.lora.aggregate, failed)
    orders = replace(orders, aggregator=(settings.advertise, door.port))
    training_ = Training(hub, orders, states, say=settings.say, record=diary.record)

    def all_here(classes: int) -> None:
        keeper.classes = classes
        settings.begun()

    training_.begun = all_here
    training_.evaluate = lambda _: central.evaluate(keeper.classes, states.averages)
    work = asyncio.create_task(training_.run())
    both: set[asyncio.Future[Any]] = {work, failure, states.work}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            raise failure.result()
        if states.work.done():
            states.work.result()  # a fault of ours: nobody else would tell
        await work
        return training_
    finally:
        work.cancel()
        await leave(partial(asyncio.gather, work, return_exceptions=True), states.close)
