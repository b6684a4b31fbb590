"""A worker that averages for all, where ``server.aggregator`` names it: what stands beside the coordinator otherwise.

The model of each round is written into this party's folder, and evaluated on the rows of this machine; the coordinator
keeps the manifest of the round, and sees no tensor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from splitlm.bus.base import Spoke
from splitlm.coordinator.members import Who
from splitlm.core import training
from splitlm.core.errors import SplitlmError, UsageError
from splitlm.finetune.compute import Runs
from splitlm.finetune.output import write_outputs
from splitlm.finetune.recipe import Recipe
from splitlm.node.aggregator import StateHub
from splitlm.node.evaluation import Central
from splitlm.wire.channel import Listener


class Averaging:
    """The aggregator in a worker's process. To be made in a running event loop; owns the listener.

    Args:
        door: for ``state`` links.
        recipe: the run's.
        central: evaluates the average.
        classes: of a classifier's head.
        folder: where the model goes, if the run keeps one.
        runner: the worker's compute thread.
        spoke: the way to the coordinator.
        spawn: starts a task that ends the party if it fails.
        say: takes one line of progress.

    Raises:
        UsageError: the run keeps its model, and there is no folder to keep it in.
    """

    def __init__(
        self,
        door: Listener,
        *,
        recipe: Recipe,
        central: Central,
        classes: int,
        folder: Path | None,
        runner: Runs,
        spoke: Spoke,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._central, self._classes = recipe, central, classes
        self._runner, self._spoke, self._spawn, self._say = runner, spoke, spawn, say
        self._folder = folder if recipe.config.server.parameters.save else None
        if recipe.config.server.parameters.save and folder is None:
            raise UsageError(
                "This worker averages and has no folder for the model that comes of it",
                where="--folder",
                expected="a folder on this machine",
                remedy="Name one, or set server.parameters.save: False",
            )
        self.port = door.port
        self._failure: asyncio.Future[SplitlmError] = asyncio.get_running_loop().create_future()
        self._hub = StateHub(door, runner, None, recipe.config.fine_tune.lora.aggregate, self._failed)
        self._members: set[Who] = set()
        self._round = -1
        self._tasks = [spawn(self._watch())]

    async def close(self) -> None:
        """Part from all."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._hub.close()

    async def hear(self, said: training.Average | training.Keep) -> None:
        """One message of the coordinator; what takes long is done in a task."""
        if isinstance(said, training.Keep):
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(self._spawn(self._keep(said.round)))
            return
        members: list[Who] = list(said.members)
        for who in self._members - set(members):
            await self._hub.without(who)
        self._members = set(members)
        if said.round < 0:
            await self._hub.expect(members)
        elif said.round != self._round:
            await self._hub.begin(said.round, members)
        self._round = said.round

    async def _keep(self, round_: int) -> None:
        """Everyone has the average: write the model, evaluate it, and say so."""
        averages, folder = self._hub.averages, self._folder
        if folder is not None:
            trained = {name: tensor for state in averages.values() for name, tensor in state.items()}
            place = await self._runner.run(write_outputs, folder, self._recipe, trained)
            if not round_:
                self._say(f"the model of each round is written to {place}")
        found = await self._central.evaluate(self._classes, averages)
        counted = sorted(await self._hub.complete(round_, {}))
        await self._spoke.send(training.Kept(round_, counted, found))

    def _failed(self, error: SplitlmError) -> None:
        if not self._failure.done():
            self._failure.set_result(error)

    async def _watch(self) -> None:
        """A state that cannot be averaged ends the run, and so does a fault of ours."""
        both: set[asyncio.Future[Any]] = {self._failure, self._hub.work}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            raise self._failure.result()
        self._hub.work.result()
