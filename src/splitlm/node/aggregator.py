"""The aggregator: takes every party's state at a round's end, and gives each role its average back.

It runs beside the coordinator, whose room holds no tensors, or in a worker's process (``node/averaging``). No owner
sees another owner's update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from splitlm.coordinator.members import Who
from splitlm.core import training
from splitlm.core.errors import NetworkError, ProtocolError, SplitlmError
from splitlm.core.shape import Role
from splitlm.finetune.aggregate import Averager, Lora, Reducer
from splitlm.finetune.compute import Compute, Runs
from splitlm.finetune.transfer import State, receive_state, send_state
from splitlm.wire.channel import Channel, Listener

ROLES: tuple[Role, ...] = ("owner", "worker")


class Keeper(Protocol):
    """Who writes a round to disk."""

    async def keep(
        self, round_: int, states: dict[Role, dict[str, torch.Tensor]], saved: dict[Who, training.Saved]
    ) -> None:
        """Everyone has these averages."""
        ...


@dataclass
class _Round:
    number: int
    members: list[Who]
    states: dict[Who, State] = field(default_factory=dict)
    done: set[Role] = field(default_factory=set)
    counted: set[Who] = field(default_factory=set)


class StateHub:
    """Links to all parties, and what comes of them.

    To be made in a running event loop; owns the listener and the channels it accepts.

    Args:
        listener: for ``state`` links.
        runner: the compute thread that averages.
        keeper: who writes rounds, or None.
        lora: how factors of adapters are averaged.
        failed: told when a state could not be averaged: the run cannot go on.
    """

    def __init__(
        self,
        listener: Listener,
        runner: Runs,
        keeper: Keeper | None,
        lora: Lora,
        failed: Callable[[SplitlmError], None],
    ) -> None:
        self._listener, self._keeper, self._lora, self._failed = listener, keeper, lora, failed
        self._runner = Compute(runner, "the aggregator")
        self._channels: dict[Who, Channel] = {}
        self._readers: dict[Who, asyncio.Task[None]] = {}
        self._round: _Round | None = None
        self._early: dict[Who, State] = {}
        self._gradients: dict[tuple[int, int], dict[Who, State]] = {}
        self._newest = (0, 0)
        self._workers: list[Who] = []
        self._gone: set[Who] = set()
        self._due = asyncio.Event()
        self._closing: list[asyncio.Task[None]] = []
        self.averages: dict[Role, dict[str, torch.Tensor]] = {}
        self._arrivals = asyncio.create_task(self._accept())
        # One task averages and gives back: readers end with their party, and what it brought must still reach others.
        self.work = asyncio.create_task(self._work())
        """Ends only with ``close``, or with a fault of ours."""

    @property
    def busy(self) -> bool:
        """Whether it is averaging or summing now."""
        return self._runner.busy

    @property
    def jobs(self) -> int:
        """How many averages and sums are done."""
        return self._runner.jobs

    async def close(self) -> None:
        """Part from all."""
        tasks = [self._arrivals, self.work, *self._readers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._listener.close()
        await asyncio.gather(*self._closing, *(channel.close() for channel in self._channels.values()))

    async def expect(self, members: list[Who]) -> None:
        """These take part."""
        self._workers = sorted(who for who in members if who[0] == "worker")

    async def begin(self, round_: int, members: list[Who]) -> None:
        """A round's states are about to come."""
        self._round = _Round(round_, list(members))
        for who, state in list(self._early.items()):
            del self._early[who]
            self._update(who, state)
        self._due.set()

    async def without(self, who: Who) -> None:
        """One is lost: what it sent counts only where it was averaged already."""
        self._gone.add(who)
        self._workers = [w for w in self._workers if w != who]
        self._early.pop(who, None)
        # The window at hand, if there is one, is done again: its sums are wanted no more.
        self._gradients.clear()
        if self._round is not None and who in self._round.members:
            self._round.members.remove(who)
            self._round.states.pop(who, None)
        channel = self._channels.pop(who, None)
        if (task := self._readers.pop(who, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        if channel is not None:
            self._closing.append(asyncio.create_task(channel.close()))  # a party that is stopped takes its time
        self._due.set()

    async def complete(self, round_: int, saved: dict[Who, training.Saved]) -> set[Who]:
        """Everyone has the round's average: write what is to be kept; whose states are in it."""
        if self._keeper is not None:
            await self._keeper.keep(round_, self.averages, saved)
        return set(self._round.counted) if self._round is not None else set()

    async def _accept(self) -> None:
        while True:
            try:
                channel = await self._listener.accept()
            except NetworkError:
                return
            role = channel.claims.role
            who: Who = (role, channel.claims.place)  # type: ignore[assignment]  # checked in the next line
            if role not in ROLES or who in self._channels or who in self._gone:
                await channel.close()
                continue
            self._channels[who] = channel
            self._readers[who] = asyncio.create_task(self._read(who, channel))

    async def _read(self, who: Who, channel: Channel) -> None:
        try:
            while True:
                state = await receive_state(channel)
                if state.what == "update":
                    self._update(who, state)
                elif state.what == "gradient" and who[0] == "worker":
                    self._gradient(who, state)
                else:
                    raise ProtocolError(f"{who[0]} {who[1]} sent a {state.what}", expected="an update or a gradient")
                self._due.set()
        except NetworkError as error:
            if isinstance(error, ProtocolError):
                self._failed(error)
            # otherwise the party is gone, which the bus says too
        except SplitlmError as error:
            self._failed(error)

    def _update(self, who: Who, state: State) -> None:
        round_ = self._round
        if round_ is None or state.round > round_.number:
            self._early[who] = state
        elif state.round == round_.number and who in round_.members:
            round_.states[who] = state

    def _gradient(self, who: Who, state: State) -> None:
        """One worker's gradients; those of an attempt that was aborted are dropped once a newer one's come."""
        key = (state.round, state.window)
        if key < self._newest or who in self._gone:
            return
        if key > self._newest:
            self._newest = key
            self._gradients.clear()
        self._gradients.setdefault(key, {})[who] = state

    async def _work(self) -> None:
        try:
            while True:
                await self._due.wait()
                self._due.clear()
                await self._give_sum()
                await self._give_averages()
        except SplitlmError as error:
            self._failed(error)

    async def _give_averages(self) -> None:
        """Average and give back each role whose members have all sent."""
        round_ = self._round
        if round_ is None:
            return
        for role in ROLES:
            members = sorted(who for who in round_.members if who[0] == role)
            if role in round_.done or not members or any(who not in round_.states for who in members):
                continue
            round_.done.add(role)
            round_.counted.update(members)
            states = [round_.states.pop(who) for who in members]
            mean = await self._runner.run(self._average, [f"{r} {n}" for r, n in members], states)
            # Without a sample anywhere the role keeps its parameters: those of the first, which are all alike then.
            self.averages[role] = mean if mean is not None else states[0].tensors
            back = State("model", round_.number, 0, sum(s.samples for s in states), self.averages[role])
            await asyncio.gather(*(self._give(who, back) for who in members))

    def _average(self, names: list[str], states: list[State]) -> dict[str, torch.Tensor] | None:
        averager = Averager(len(states), lora=self._lora, names=names)
        for i, state in enumerate(states):
            averager.add(i, state.samples, state.tensors)
        return averager.result()

    async def _give_sum(self) -> None:
        """Give all workers the sum of their gradients once the last has come."""
        came = self._gradients.get(self._newest)
        members = self._workers
        if came is None or not members or any(who not in came for who in members):
            return
        del self._gradients[self._newest]
        total = await self._runner.run(self._reduce, [f"worker {n}" for _, n in members], [came[w] for w in members])
        back = State("gradient", came[members[0]].round, came[members[0]].window, 0, total)
        await asyncio.gather(*(self._give(who, back) for who in members))

    def _reduce(self, names: list[str], states: list[State]) -> dict[str, torch.Tensor]:
        reducer = Reducer(len(states), names=names)
        for i, state in enumerate(states):
            reducer.add(i, state.tensors)
        return reducer.result() or {}

    async def _give(self, who: Who, state: State) -> None:
        channel = self._channels.get(who)
        if channel is None:
            return
        try:
            await send_state(channel, state)
        except NetworkError:
            return  # it is gone, which the bus says too
