"""One party's process in training: it registers, builds its parts, links to its neighbours, and does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from splitlm.bus.base import Spoke
from splitlm.core import messages, training
from splitlm.core.config import RunConfig, here, read
from splitlm.core.config_cautions import SECOND_DRAW
from splitlm.core.errors import DataMissingError, NetworkError, PeerLostError, ProtocolError, SplitlmError
from splitlm.core.errors import from_exit_code as reported
from splitlm.core.groups import first_error
from splitlm.core.heard import Heard
from splitlm.finetune.compute import HUNG, Compute
from splitlm.finetune.crossing import Crossing
from splitlm.finetune.data import Rows
from splitlm.finetune.discretion import discreet
from splitlm.finetune.engine import Engine
from splitlm.finetune.partyfile import held
from splitlm.finetune.plane import Neighbour, Plane
from splitlm.finetune.recipe import OwnerData, Recipe, model_folder, open_recipe, read_rows
from splitlm.model.device import find_device, receive_memory
from splitlm.model.runner import Runner
from splitlm.node.averaging import Averaging
from splitlm.node.ending import leave
from splitlm.node.evaluation import Central
from splitlm.node.figures import figures, log_figures
from splitlm.node.identity import node_name, watch_parent
from splitlm.node.partylinks import PartyLinks
from splitlm.node.partysettings import PartySettings as PartySettings
from splitlm.node.pulse import Pulse
from splitlm.node.trainbus import join_rabbit, join_star
from splitlm.node.tuning import Tuning
from splitlm.wire.channel import Channel
from splitlm.wire.pool import allocate_heap

_log = logging.getLogger("splitlm.train")
GO_ON = "If the coordinator is gone, splitlm coordinator --resume RUN goes on, with its parties started again"
"""What to do where a run broke off."""
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a task of a group."""


async def join_run(settings: PartySettings, coordinator: tuple[str, int] | None, parent: int = 0) -> None:
    """Join a coordinator, and take part in its run; see ``run_party``.

    Args:
        settings: what the user says.
        coordinator: its address; None where both meet at the broker of the settings.
        parent: the process that started this one for its own run, which has no use without it; 0 for none.

    Raises:
        UsageError: there is no certificate where one is needed.
        PeerMissingError: the coordinator did not answer in time, or there is no broker. Otherwise as ``run_party``.
    """
    links, name = settings.links, node_name(settings.role)
    try:
        async with asyncio.TaskGroup() as group:
            orphaned = group.create_task(watch_parent(parent)) if parent else None
            spoke: Spoke
            if coordinator is None:
                spoke = await join_rabbit(settings.config, name, links.host, links.deadline_s)
            else:
                spoke = await join_star(name, coordinator, links.host, links.token, links.guard, links.deadline_s)
                if orphaned is not None:
                    orphaned.cancel()  # from here on the channel ends with it
            try:
                await run_party(settings, spoke)
            finally:
                if orphaned is not None:
                    orphaned.cancel()
                await spoke.close()
    except* SplitlmError as errors:
        error = first_error(errors)
        if isinstance(error, PeerLostError) and not error.remedy:
            error.remedy = GO_ON
        raise error from None


async def run_party(settings: PartySettings, spoke: Spoke, runner: Runner | None = None) -> None:
    """Take part in a run, from registering to the coordinator's Stop.

    Args:
        settings: what the user says.
        spoke: the way to the coordinator; it stays the caller's.
        runner: a compute thread to share with other parties of this process; by default its own.

    Raises:
        PeerLostError: the coordinator went away.
        SplitlmError: what this party cannot go on with. The coordinator is told first.
    """
    own = runner or Runner(settings.threads)
    try:
        await _Party(settings, spoke, own).run()
    except ExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        if runner is None:
            await asyncio.to_thread(own.close, 5.0)


class _Party:
    def __init__(self, settings: PartySettings, spoke: Spoke, runner: Runner) -> None:
        self._settings, self._spoke = settings, spoke
        self._runner = Compute(runner, settings.role)
        self._moved: Callable[[], object] = tuple
        self._name = node_name(settings.role)
        self._device = find_device(settings.device)
        self._figures: Callable[[], dict[str, float]] = dict
        self._heard = Heard()
        self._tuning: Tuning | None = None
        self._averaging: Averaging | None = None

    async def run(self) -> None:
        settings, rows = self._settings, None
        if settings.role == "owner":
            rows = await asyncio.to_thread(read_rows, settings.config, "train", settings.own_data)
        classes, mark = (rows.num_labels, rows.fingerprint) if rows is not None else (0, "")
        kept = await asyncio.to_thread(held, settings.folder, settings.role, mark) if settings.folder else {}
        await self._spoke.send(training.Register(settings.role, self._name, settings.weight, classes, kept))
        try:
            await self._take_part(rows)
        except SplitlmError as error:
            if not isinstance(error, PeerLostError):
                await self._tell(error)
            raise
        except asyncio.CancelledError:
            await self._tell(NetworkError("It was stopped on its own machine"))
            raise

    async def _tell(self, error: SplitlmError) -> None:
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(1.0):
                trouble = messages.trouble(discreet(self._settings.role, error))
                # What would only happen again ends the run; a network's trouble costs it this party.
                said = trouble if isinstance(error, NetworkError) else training.Failed(trouble.code, trouble.text)
                await self._spoke.send(said)

    async def _start(self) -> training.Start:
        match await self._spoke.receive():
            case training.Start() as start:
                self._heard.repeats(start)
                return start
            case messages.Stop(reason=reason):
                raise NetworkError(f"The coordinator has no place for this {self._settings.role}: {reason}")
            case messages.Trouble(code=code, text=text):
                raise reported(code, f"The coordinator parted from this {self._settings.role}: {text}")
            case other:
                raise ProtocolError(f"A {type(other).__name__} message came", expected="Start")

    async def _take_part(self, rows: Rows | None) -> None:
        start = await self._start()
        self._runner.where = lambda: f"{self._settings.role} {start.party}"
        timeout_s = self._config(start).learning.u_shape.timeout_seconds
        async with Pulse(self._working, timeout_s, self._runner, lambda: self._moved()):
            await self._train(start, rows)

    async def _working(self) -> None:
        """Say that this party is at work. That the coordinator is gone is heard where its last words are."""
        with contextlib.suppress(NetworkError):
            await self._spoke.send(training.Working(self._tuning.round if self._tuning is not None else 0))

    async def _train(self, start: training.Start, rows: Rows | None) -> None:
        settings = self._settings
        recipe, data = await self._runner.run(self._open, start, rows)
        learning, noise = recipe.config.learning, max(recipe.config.privacy.noise, settings.config.privacy.noise)
        party = await self._runner.run(recipe.party, settings.role, start.party, self._device, settings.pace_ms)
        self._runner.where = lambda: party.place
        memory = receive_memory(learning.u_shape.pinned_memory, self._device, allocate_heap)
        links = PartyLinks(
            replace(settings.links, allocate=memory),
            recipe.files,
            settings.role,
            start.party,
            self._name,
            start,
            self._spoke.hub_host,
            recipe.config,
        )
        plane = Plane(self._on_lost, learning.u_shape.transport_queue_size)
        crossing = Crossing(settings.role, self._device, noise)
        if noise and settings.role == "owner" and start.resume >= 0:
            _log.warning("%s", SECOND_DRAW)
        engine = Engine(party, plane, self._runner, learning.u_shape.timeout_seconds, crossing)
        self._moved = lambda: links.state_bytes
        self._figures = lambda: figures(engine, plane, links, crossing)
        try:
            async with asyncio.TaskGroup() as group:
                host, activation, gradient = await links.listen(plane)
                batches = await self._runner.run(data.round, 0) if data is not None else []
                tuning = self._tuning = Tuning(
                    recipe=recipe,
                    party=party,
                    engine=engine,
                    plane=plane,
                    runner=self._runner,
                    spoke=self._spoke,
                    data=data,
                    start=start,
                    folder=settings.folder,
                    spawn=group.create_task,
                    say=settings.say,
                )
                await tuning.resume()
                averaging = self._averaging = await self._average(links, recipe, start, group.create_task)
                await self._spoke.send(
                    training.Loaded(
                        host,
                        activation,
                        gradient,
                        sum(batch.samples for batch in batches),
                        sum(p.numel() for p in party.parameters.values()),
                        recipe.goal.token_loss,
                        len(batches),
                        averaging.port if averaging is not None else 0,
                    )
                )
                # From here on others wait for what is computed; a model may be fetched for as long as it takes.
                watch = group.create_task(self._runner.watch(learning.u_shape.timeout_seconds * HUNG))
                await group.create_task(self._listen(tuning, links, plane, start))
                watch.cancel()
                await self._leave()
        except* SplitlmError as errors:
            raise first_error(errors) from None
        finally:
            await leave(self._leave, self._log_figures, plane.close, links.close)

    async def _log_figures(self) -> None:
        log_figures(self._figures())

    async def _leave(self) -> None:
        """Leave nothing running."""
        for part in (self._tuning, self._averaging):
            if part is not None:
                await part.close()

    async def _average(
        self, links: PartyLinks, recipe: Recipe, start: training.Start, spawn: Spawn
    ) -> Averaging | None:
        """The aggregator, where this worker is the one that averages."""
        if not start.averages:
            return None
        settings = self._settings
        central = Central(recipe.config, settings.resolve, self._runner, settings.objectives)
        await central.open()
        return Averaging(
            await links.listen_states(),
            recipe=recipe,
            central=central,
            classes=start.classes,
            folder=settings.folder,
            runner=self._runner,
            spoke=self._spoke,
            spawn=spawn,
            say=settings.say,
        )

    async def _listen(self, tuning: Tuning, links: PartyLinks, plane: Plane, start: training.Start) -> None:
        while True:
            said = await self._spoke.receive()
            if self._heard.repeats(said):
                continue
            match said:
                case training.Peers() as peers:
                    at = peers.aggregator or start.aggregator
                    if (states := await self._meet(links.meet(plane, peers, at))) is None:
                        return
                    tuning.linked(peers, states)
                    await self._spoke.send(training.Linked())
                case training.Average() | training.Keep() if self._averaging is not None:
                    await self._averaging.hear(said)
                case messages.Stop(reason=reason):
                    self._settings.say(reason)
                    return
                case messages.Trouble(code=code, text=text):
                    raise reported(code, f"The coordinator parted from this {self._settings.role}: {text}")
                case _:
                    if isinstance(said, training.Gather):  # before the average: the last one's end is the run's
                        await self._spoke.send(training.Figures(self._figures()))
                    await tuning.hear(said)

    async def _meet(self, meeting: Coroutine[Any, Any, Channel]) -> Channel | None:
        """Link to the others, unless the coordinator says meanwhile that nothing comes of the run: then None."""
        links, told = asyncio.create_task(meeting), asyncio.create_task(self._told())
        try:
            await asyncio.wait({links, told}, return_when=asyncio.FIRST_COMPLETED)
            if not told.done():
                return links.result()
            self._settings.say(told.result())
            return None
        finally:
            for task in (links, told):
                task.cancel()
            await asyncio.gather(links, told, return_exceptions=True)

    async def _told(self) -> str:
        """Wait for the coordinator's Stop; its reason."""
        while True:
            match await self._spoke.receive():
                case messages.Stop(reason=reason):
                    return reason
                case messages.Trouble(code=code, text=text):
                    raise reported(code, f"The coordinator parted from this {self._settings.role}: {text}")
                case said if not self._heard.repeats(said):
                    raise ProtocolError(f"A {type(said).__name__} message came", expected="none before Linked")

    def _on_lost(self, who: Neighbour, error: NetworkError) -> None:
        if self._tuning is not None:
            self._tuning.lost(who, error)

    def _config(self, start: training.Start) -> RunConfig:
        """The run's settings, with this machine's places."""
        return here(read(start.settings, "the coordinator's settings"), self._settings.config)

    def _open(self, start: training.Start, rows: Rows | None) -> tuple[Recipe, OwnerData | None]:
        """On the compute thread: the run's settings hold, but for where things lie on this machine."""
        config = self._config(start)
        recipe = open_recipe(
            config,
            model_folder(config, self._settings.resolve),
            start.classes,
            objectives=self._settings.objectives,
            dtype=self._settings.dtype,
        )
        if rows is None:
            return recipe, None
        valid, own = None, self._settings.own_data
        if config.server.validation:
            try:
                valid = read_rows(self._settings.config, "validation", own)  # from where those of training are
            except DataMissingError as error:
                _log.warning("Nothing is validated here, for want of rows: %s", error)
        return recipe, OwnerData(recipe, start.party, rows, valid, own=own is not None)
