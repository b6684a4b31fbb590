"""What a party does on the coordinator's word: windows, steps, rounds, averages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

from splitlm.bus.base import Spoke
from splitlm.core import messages, training
from splitlm.core.barrier import Event, Follower, step
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError, SplitlmError
from splitlm.finetune.batch import Microbatch
from splitlm.finetune.compute import Runs
from splitlm.finetune.discretion import Report, discreet
from splitlm.finetune.engine import Engine
from splitlm.finetune.party import Party
from splitlm.finetune.plane import LinkLostError, Neighbour, Plane
from splitlm.finetune.recipe import OwnerData, Recipe
from splitlm.finetune.transfer import State
from splitlm.model.tuned import load_into
from splitlm.node.alone import Alone
from splitlm.node.announced import Announced, plan_of
from splitlm.node.reach import Reach
from splitlm.node.shelf import Shelf
from splitlm.node.states import States
from splitlm.node.validation import Validation
from splitlm.planner.routing import SmoothWRR, Speeds
from splitlm.wire.channel import Channel

LAST_WORD_S = 1.0


class Tuning:
    """One party in a run; see ``hear``. ``round`` is the one at hand."""

    def __init__(
        self,
        *,
        recipe: Recipe,
        party: Party,
        engine: Engine,
        plane: Plane,
        runner: Runs,
        spoke: Spoke,
        data: OwnerData | None,
        start: training.Start,
        folder: Path | None,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._party, self._engine, self._plane = recipe, party, engine, plane
        self._runner, self._spoke, self._data, self._start = runner, spoke, data, start
        self._spawn, self._say = spawn, say
        self._shelf = Shelf(recipe, party, start, folder, data.mark if data is not None else "")
        self._follower = Follower()
        self._open: Announced | None = None
        self._work: asyncio.Task[None] | None = None
        self._giving: asyncio.Task[None] | None = None
        self._states: States | None = None
        self.round = 0
        self._batches: list[Microbatch] = []
        self._at = 0
        self._samples = 0
        self._report = Report()
        self._weights: dict[int, float] = {}
        self._speeds: Speeds[int] | None = None
        self._turns: SmoothWRR[int] | None = None
        self._validation = Validation()
        self._alone = Alone(party, engine, runner, spoke, recipe.config.learning.control_count)
        self._reach = Reach(plane, serves=party.role == "worker" and not recipe.shape.agreed)

    @property
    def _by_item(self) -> bool:
        return self._recipe.config.learning.loss_weighting == "token"

    @property
    def _synced(self) -> bool:
        """Whether this party is one of several that take the same step."""
        return self._party.role == "worker" and self._recipe.config.learning.body_sync == "window"

    def linked(self, peers: training.Peers, state: Channel) -> None:
        """All links are up."""
        self._states = States(state)
        self._weights = {peer.worker: peer.weight for peer in peers.workers}
        self._speeds = Speeds(self._weights)
        self._reach.expect({("worker", number) for number in self._weights})

    def lost(self, who: Neighbour, error: NetworkError) -> None:
        """A link to a neighbour ended."""
        self._reach.lost(who, error)

    async def resume(self) -> None:
        """Take up what was stored, where the run goes on from a round.

        Raises:
            CheckpointError: it is not here, or does not fit.
        """
        await self._runner.run(self._shelf.resume)

    async def close(self) -> None:
        """Leave nothing running."""
        tasks = [task for task in (self._work, self._giving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._states is not None:
            await self._states.close()

    async def _tell(self, message: messages.Message) -> None:
        """Say something to the coordinator. That it is gone is heard where its last words are."""
        with contextlib.suppress(PeerLostError):
            await self._spoke.send(message)

    @property
    def states(self) -> States:
        """The way to the aggregator.

        Raises:
            ProtocolError: there is none yet.
        """
        if self._states is None:
            raise ProtocolError("There is no link to the aggregator", expected="Peers first")
        return self._states

    async def hear(self, said: messages.Message) -> None:
        """One message of the coordinator.

        Raises:
            ProtocolError: one that has no place here.
            SplitlmError: what this party cannot go on with.
        """
        match said:
            case training.Round() as round_:
                await self._begin(round_)
            case training.Over():
                await self._finish()
            case training.Window() as word:
                self._measured(word)
                await self._on(Event("PREPARE", word.seq, 0), word)
            case training.Opened() as opened:
                if self._open is not None and opened.seq == self._open.word.seq:
                    if self._party.role == "worker":
                        await self._reach.only({("owner", share.owner) for share in opened.shares})
                    self._work = self._spawn(self._window(self._open, opened))
            case messages.Commit(seq=seq, epoch=epoch):
                await self._on(Event("COMMIT", seq, epoch))
            case messages.Abort(seq=seq, reason=reason):
                await self._on(Event("ABORT", seq, reason=reason))
            case training.Working():  # a worker is, so the coordinator says
                self._engine.alive()
            case training.Gather(round=number):
                self._giving = self._spawn(self._average(number))  # and hear meanwhile: its end may depend on it
            case other:
                raise ProtocolError(f"A {type(other).__name__} message came from the coordinator")

    async def _on(self, event: Event, word: training.Window | None = None) -> None:
        """Step the barrier's table, and do what it asks for."""
        self._follower, actions = step(self._follower, event)
        for action in actions:
            match action.does:
                case "prepare" if word is not None:
                    await self._plan(word)
                case "say READY":
                    await self._tell(messages.Prepared(action.seq))
                case "say NACK":
                    await self._tell(messages.Nack(action.seq, action.reason))
                case "discard":
                    await self._discard()
                case "apply":
                    await self._step(action.seq)
                    await self._on(Event("applied", action.seq))
                case "say DONE":
                    await self._tell(messages.Done(action.seq))
                case "stop: violation" | "stop: state unknown" | "stop: peer lost":
                    raise ProtocolError(action.reason or "The coordinator spoke out of turn")
                case _:
                    pass  # timers are the coordinator's

    async def _begin(self, word: training.Round) -> None:
        """A round begins."""
        party, number = self._party, word.round
        self.round, self._at, self._samples = number, 0, 0
        self._report = Report()
        if self._recipe.config.optimizer.reset_each_round and number:
            await self._runner.run(party.reset)
        if self._speeds is not None:
            self._speeds.new_round()
            self._turns = SmoothWRR(self._weights)  # a run that is gone on with begins here too
        if self._data is not None:
            self._batches = await self._runner.run(self._data.round, number)
            self._validation = Validation(await self._runner.run(self._data.validation) if word.validate else ())
        if not self._recipe.shape.agreed and (self._work is None or self._work.done()):
            work = self._round_alone if party.role == "owner" else self._engine.serve
            self._work = self._spawn(self._guarded(work))

    async def _plan(self, word: training.Window) -> None:
        """What this owner has for the window; workers wait for the word that all have planned."""
        if self._party.role != "owner":
            self._open = Announced(word)
            return
        await self._reach.only({("worker", number) for number in word.workers})
        if (error := self._reach.missing()) is not None:
            await self._blame(error, word.seq)
            return
        config = self._recipe.config
        most = config.learning.u_shape.microbatches_per_window
        batches: Sequence[Microbatch]
        turns, batches, left = self._turns, self._batches[self._at : self._at + most], len(self._batches) - self._at
        if turns is None:
            raise ProtocolError("A window came before the workers were named", expected="Peers first")
        if not word.train:
            batches, left = self._validation.next(most), self._validation.left()
            turns = self._validation.turns(turns.weights)
        assign: list[int] = []
        for _ in batches:
            chosen = turns.choose(word.workers)
            if chosen is None:
                raise NetworkError("There is no worker in this window", expected="one at least")
            assign.append(chosen)
        self._open = Announced(word, batches, assign)
        items = sum(batch.weight for batch in batches)
        await self._tell(training.Plan(word.seq, assign, items, left - len(batches)))

    async def _window(self, open_: Announced, opened: training.Opened) -> None:
        """The window's work, to READY or NACK."""
        seq = open_.word.seq
        try:
            async with self._reach.kept():
                await self._engine.window(plan_of(open_, opened, self._party, self._recipe.config))
                if open_.word.train and self._synced:
                    await self._reduce(seq)
        except LinkLostError as error:
            await self._blame(error, seq)
        except NetworkError as error:
            if self.states.lost is not None:
                await asyncio.sleep(LAST_WORD_S)  # in which the coordinator may say more
                raise
            await self._on(Event("failed", seq, reason=str(error)[:1000]))
        except SplitlmError as error:  # it would only happen again
            await self._tell(self._failed(error, "window", seq))
        else:
            await self._on(Event("ready", seq))

    async def _blame(self, error: LinkLostError, seq: int) -> None:
        """The window cannot be finished. An owner says with whom; a worker is the one that others can do without."""
        if self._party.role == "owner":
            await self._tell(training.Failed(error.exit_code, str(error)[:1000], "window", seq, error.who))
        else:
            await self._on(Event("failed", seq, reason=str(error)[:1000]))

    async def _reduce(self, seq: int) -> None:
        """Workers sum their gradients, so that all of them take the same step."""
        window = self._party.window
        window.sum.total = await self.states.exchange(State("gradient", self.round, seq, 0, window.sum.total))

    async def _step(self, seq: int) -> None:
        """COMMIT: step, if there was any work here."""
        party, open_ = self._party, self._open
        window = party.window
        if not window.train:
            self._validation.take(open_.batches if open_ is not None else (), window.tally)
            self._open = None
            await self._engine.drop()
            return
        scale = 1.0 if self._synced else self._scale()
        norm = await self._runner.run(party.step, scale)
        tally = window.tally
        samples = tally.samples
        if party.role == "owner" and open_ is not None:
            self._at += len(open_.batches)
            samples = sum(batch.samples for batch in open_.batches)
        self._samples += samples
        speed = tally.padded / tally.seconds if tally.seconds > 0 and tally.padded else 0.0
        self._open = None
        told = self._report.add(tally.loss, tally.items, samples)
        await self._tell(training.Stepped(seq, *told, speed, norm))

    def _scale(self) -> float | None:
        """A worker's own share of a token-weighted window is not known to it in items: its own count tells."""
        window = self._party.window
        if not self._by_item or self._party.role == "owner":
            return None
        items = window.tally.weight
        return window.scale.total / items if items else 1.0

    async def _finish(self) -> None:
        """An owner is through its rows of the round."""
        if self._party.role == "owner":
            report = self._report
            told = self._validation.told()
            await self._tell(training.Notify(self.round, self._samples, report.loss, report.items, *told))

    def _measured(self, word: training.Window) -> None:
        """Workers that are gone are forgotten; the others said how fast they were: an owner's turns follow, if set."""
        if self._speeds is None or self._turns is None:
            return
        if gone := self._weights.keys() - set(word.workers):
            for worker in sorted(gone):
                self._speeds.drop(worker)
                del self._weights[worker]
            self._turns.reweigh({w: weight for w, weight in self._turns.weights.items() if w not in gone})
        if not self._recipe.config.learning.u_shape.adaptive_weights:
            return
        told = {worker: speed for worker, speed in sorted(word.speeds.items()) if worker in self._weights}
        for worker, speed in told.items():
            self._speeds.report(worker, speed)
        if told:
            self._turns.reweigh(self._speeds.weights())

    async def _discard(self) -> None:
        """ABORT: what was computed is forgotten; the microbatches stay to be done."""
        work, self._work, self._open = self._work, None, None
        if work is not None and work is not asyncio.current_task():
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        await self._engine.drop()
        await self._reach.forget()

    async def _average(self, number: int) -> None:
        """Send this party's parameters, and take the average."""
        party = self._party
        if party.role == "worker" and not self._recipe.shape.agreed:
            self._samples = await self._runner.run(party.counted)
        tensors = {name: p.detach() for name, p in party.parameters.items()}
        mean = await self.states.exchange(State("update", number, 0, self._samples, tensors))
        await self._runner.run(load_into, party.parameters, mean)
        await self._tell(training.Saved(number, await self._runner.run(self._shelf.save, number)))

    async def _round_alone(self) -> None:
        """An owner's round where nothing is agreed."""
        self._samples = await self._alone.round(self.round, self._batches, self._validation, self._report)
        await self._finish()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """A round's work; what it fails with is told."""
        try:
            async with self._reach.kept():
                await work()
        except LinkLostError as error:
            await self._tell(training.Failed(error.exit_code, str(error)[:1000], suspect=error.who))
        except SplitlmError as error:
            await self._tell(self._failed(error))

    def _failed(self, error: SplitlmError, where: Literal["", "window"] = "", seq: int = 0) -> training.Failed:
        trouble = messages.trouble(discreet(self._party.role, error))
        return training.Failed(trouble.code, trouble.text, where, seq)
