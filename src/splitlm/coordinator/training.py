"""The one who decides in training: who takes part, when a window begins and is stepped, when a round is over.

A library without torch: it talks over a bus, and hands tensors to nobody. Windows of an agreed shape are barriers of
core/barrier.py; what is lost before COMMIT costs the window, which is done again without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

from splitlm.bus.base import Hub, PeerCame, PeerGone
from splitlm.coordinator.attempt import REASON, Attempt
from splitlm.coordinator.closing import Closing
from splitlm.coordinator.members import Lost, Member, Members
from splitlm.coordinator.orders import Aggregator, Orders, Standing
from splitlm.coordinator.places import Places
from splitlm.core import errors, messages, training
from splitlm.core.errors import NetworkError, PeerLostError, PeerMissingError, ProtocolError, SplitlmError
from splitlm.core.shape import Role

TRIES = 3
"""Attempts at a window with the same parties."""
LAST_WORD_S = 1.0


async def _nothing(_: int) -> dict[str, Any]:
    return {}


class Training:
    """Runs a training to its end.

    Args:
        hub: the bus; its spokes are parties. It stays the caller's.
        orders: what is to be run.
        aggregator: who averages.
        say: takes a line of progress.
        record: takes what is to be kept of each window and round.
    """

    def __init__(
        self,
        hub: Hub,
        orders: Orders,
        aggregator: Aggregator,
        *,
        say: Callable[[str], None] = lambda _: None,
        record: Callable[[str, dict[str, Any]], None] = lambda _, __: None,
    ) -> None:
        self._hub, self.orders, self._aggregator = hub, orders, aggregator
        self.say, self._record = say, record
        self.members = Members()
        self._places = Places(orders, self.members)
        self.standing = Standing()
        self._seq = 0
        self._full = False
        self._unheard: list[Lost] = []
        self.speeds: dict[int, float] = {}
        self.averages: Member | None = None
        """The worker that averages, where one does."""
        self._classes = orders.classes
        self.begun: Callable[[int], None] = lambda _: None
        """Told the number of classes once all parties are here."""
        self.evaluate: Callable[[int], Awaitable[dict[str, Any]]] = _nothing
        """Asked what the average of a round is worth; it goes into the round's record."""

    def next_seq(self) -> int:
        """The number of a new barrier."""
        self._seq += 1
        return self._seq

    async def run(self) -> None:
        """Gather the parties, train, and let them go.

        Raises:
            PeerMissingError: not all parties came.
            PeerLostError: no owner, or no worker, is left.
            SplitlmError: a party failed with what would only happen again: what it said.
        """
        last: messages.Message = messages.Stop("The run is over")
        try:
            await self._gather()
            self.begun(self._classes)
            await self._begin()
            for number in range(self.orders.first, self.orders.rounds):
                await self._round(number)
        except SplitlmError as error:
            last = _early(str(error))
            raise
        except asyncio.CancelledError:
            last = _early("The coordinator was stopped")
            raise
        finally:
            await self.tell_all(last)

    async def tell(self, member: Member, message: messages.Message) -> None:
        """Say something to a party; one that is gone is heard of by ``hear``."""
        try:
            async with asyncio.timeout(self.orders.timeout_s):
                await self._hub.send(member.peer, message)
        except PeerLostError:
            return
        except TimeoutError:
            await self._hub.drop(member.peer)
            self._unheard.append(Lost(member, "it took no message in time"))

    async def tell_all(self, message: messages.Message) -> None:
        """Say something to every party that is left."""
        for member in self.members:
            await self.tell(member, message)

    async def hear(self, deadline_s: float, awaited: str, *, relay: bool = False) -> tuple[Member, Any]:
        """The next message of a party. While one says that it is at work, all are waited for anew.

        Args:
            deadline_s: how long nobody may be at work.
            awaited: who is waited for, and to do what.
            relay: whether owners are told which workers are at work: they wait for them too.

        Raises:
            Lost: one is gone.
            PeerMissingError: nothing came in time.
        """
        while self._unheard:
            if (lost := self._unheard.pop(0)).member in self.members:
                raise lost
        jobs = self._aggregator.jobs
        try:
            async with asyncio.timeout(deadline_s) as limit:
                while True:
                    peer, event = await self._hub.receive()
                    member = self.members.by_peer(peer)
                    match event:
                        case PeerGone(reason=reason) if member is not None:
                            raise Lost(member, reason)
                        case messages.Trouble(text=text) if member is not None:
                            await self._hub.drop(peer)
                            raise Lost(member, text)
                        case training.Register() if member is None:
                            if (fresh := await self._register(peer, event)) is not None:
                                return fresh, event
                        case training.Failed(code=code, text=text, where="", suspect=suspect) if member is not None:
                            if suspect is not None and (out := self.members.blamed(member, suspect, text)) is not None:
                                raise out
                            raise errors.from_exit_code(code, f"{member}: {text}")
                        case PeerCame() | PeerGone() | messages.Ping() | training.Register():
                            continue
                        case training.Figures(values=values) if member is not None:
                            self._record("party", {"round": self.standing.round, "party": member.label, **values})
                        case training.Working():
                            if not limit.expired():
                                limit.reschedule(asyncio.get_running_loop().time() + deadline_s)
                            if relay and member is not None and member.who[0] == "worker":
                                for owner in self.members.of("owner"):
                                    await self.tell(owner, event)
                        case other if member is not None and not member.heard.repeats(other):
                            return member, other
        except TimeoutError:
            if not self._aggregator.busy and self._aggregator.jobs == jobs:  # else what it made is on its way
                raise PeerMissingError(f"The coordinator waited {deadline_s:g} s for {awaited}") from None
        return await self.hear(deadline_s, awaited, relay=relay)

    async def _register(self, peer: str, said: training.Register) -> Member | None:
        number = None if self._full else self._places.take(said)
        if number is None:
            text = f"The run has begun without this {said.role}" if self._full else self._places.refusal(said)
            self.say(f"{said.name} is turned away: {text}")
            with contextlib.suppress(PeerLostError):
                await self._hub.send(peer, messages.Stop(text))
            await self._hub.drop(peer)
            return None
        member = self.members.add(peer, number, said)
        self._classes = max(self._classes, said.classes)
        self.say(f"{member} is here")
        return member

    async def _gather(self) -> None:
        """Wait for as many owners and workers as the run has. One that goes again before it began may be replaced."""
        wanted: dict[Role, int] = {"owner": self.orders.owners, "worker": self.orders.workers}
        while missing := {r: n - len(self.members.of(r)) for r, n in wanted.items() if n > len(self.members.of(r))}:
            names = " and ".join(f"{n} {role}{'s' * (n > 1)}" for role, n in missing.items())
            try:
                await self.hear(self.orders.deadline_s, f"{names} to register")
            except Lost as lost:
                self.say(f"{lost.member} left: {lost.reason}")
                self.members.drop(lost.member)
        self._full = True

    async def _begin(self) -> None:
        """Everyone builds its parts, and links to the others. Who is lost here ends the run: nothing has begun."""
        orders = self.orders
        self.averages = self.members.at(orders.averages) if orders.averages else None
        try:
            for member in self.members:
                start = training.Start(
                    member.who[1],
                    orders.owners,
                    orders.workers,
                    orders.run,
                    orders.settings,
                    self._classes,
                    orders.aggregator,
                    orders.resume,
                    *orders.stored_for(member.who),
                    member is self.averages,
                )
                await self.tell(member, start)
            await self._await_all(training.Loaded, "its parts to be built", self._loaded)
            await self._introduce()
        except Lost as lost:
            raise PeerLostError(
                f"{lost.member} was lost before the run began: {lost.reason.rstrip('. ')}",
                remedy="Start it again, and the coordinator",
            ) from None

    async def _loaded(self, member: Member, said: training.Loaded) -> None:
        member.loaded = said
        if said.batches:
            self._record("owner", {"party": member.label, "rows": said.rows, "batches": said.batches})
        self.say(f"{member}: {said.parameters} parameters" + (f", {said.rows} rows" * (member.who[0] == "owner")))

    async def _introduce(self) -> None:
        workers = [
            training.Peer(
                m.who[1],
                self._host(m),
                m.loaded.activation,
                m.loaded.gradient,
                m.weight,
            )
            for m in self.members.of("worker")
        ]
        await self._aggregator.expect([member.who for member in self.members])
        at = (self._host(self.averages), self.averages.loaded.state) if self.averages is not None else None
        await self.tell_all(training.Peers([m.who[1] for m in self.members.of("owner")], workers, at))
        await self._await_all(training.Linked, "its links")

    def _host(self, member: Member) -> str:
        """Where others reach a party."""
        return member.loaded.host or self._hub.address(member.peer)

    async def _await_all(
        self,
        kind: type[messages.Message],
        awaited: str,
        take: Callable[[Member, Any], Awaitable[None]] | None = None,
    ) -> None:
        """One message of this kind of every party.

        Raises:
            Lost: one is gone.
            ProtocolError: another message came.
        """
        waiting = {member.node for member in self.members}
        while waiting:
            names = ", ".join(str(m) for m in self.members if m.node in waiting)
            member, said = await self.hear(self.orders.timeout_s, f"{names} to report {awaited}")
            if not isinstance(said, kind):
                raise ProtocolError(f"{member} sent {type(said).__name__}", expected=kind.__name__)
            waiting.discard(member.node)
            if take is not None:
                await take(member, said)

    async def _round(self, number: int) -> None:
        self.standing = Standing(round=number)
        await self.tell_all(training.Round(number, self.orders.validate))
        if self.orders.shape.agreed:
            while await self._window():
                self.standing.window += 1
            self.standing.window = 0
            while self.orders.validate and await self._window(train=False):
                self.standing.window += 1
            await self.tell_all(training.Over(number))
        closing = Closing(self, self._aggregator)
        await closing.notified()
        self._record("round", await closing.averaged() | await self.evaluate(number))

    async def without(self, lost: Lost) -> None:
        """Go on without a party.

        Raises:
            PeerLostError: it was the last of its role.
        """
        member = lost.member
        self.members.drop(member)
        with contextlib.suppress(PeerLostError, TimeoutError):  # it may be there all the same, and only cut off
            async with asyncio.timeout(LAST_WORD_S):
                await self._hub.send(member.peer, messages.Trouble(3, lost.reason[:REASON]))
        await self._hub.drop(member.peer)
        await self._aggregator.without(member.who)
        left = len(self.members.of(member.who[0]))
        drift = ""
        if self.orders.drifts and member.who[0] == "worker" and self.standing.windows:
            drift = "; what it learned in this round is lost with it, for body-sync is round"
        self.say(f"{member} was lost ({lost.reason.rstrip('. ')}); {left} left{drift}")
        self._record("lost", {"party": f"{member.who[0]} {member.who[1]}", "reason": lost.reason})
        if not left or member is self.averages:
            what = "which averages for all" if left else f"and no {member.who[0]} is left"
            raise PeerLostError(
                f"{member} was lost, {what}: {lost.reason.rstrip('. ')}",
                remedy="Start the parties again and go on with splitlm train --resume",
            )

    async def _window(self, *, train: bool = True) -> bool:
        """One window, done again until it is stepped; False when no owner had anything left.

        Args:
            train: False for one of validation, at whose COMMIT nobody steps.
        """
        tries = 0
        while True:
            attempt = Attempt(self, train=train)
            outcome = await attempt.run()
            if outcome in ("stepped", "over"):
                self.standing.windows += train and outcome == "stepped"
                return outcome == "stepped"
            self.standing.repeated += 1
            tries = 0 if outcome == "without" else tries + 1
            if tries >= TRIES:
                raise NetworkError(
                    f"Window {self.standing.window} of round {self.standing.round} failed {TRIES} times, at last: "
                    + attempt.reason.rstrip(". "),
                    remedy="Look at the parties' logs, and go on with splitlm train --resume",
                )

    def stepped(self, member: Member, said: training.Stepped) -> None:
        """A party stepped: keep what its window was like."""
        self.standing.loss, self.standing.items = self.standing.loss + said.loss, self.standing.items + said.items
        if said.tokens_per_s > 0 and member.who[0] == "worker":
            self.speeds[member.who[1]] = said.tokens_per_s
        row = {
            "round": self.standing.round,
            "window": self.standing.window if self.orders.shape.agreed else self.standing.next_alone(member.who),
            "party": f"{member.who[0]} {member.who[1]}",
            "loss": said.loss / said.items if said.items else None,
            "items": said.items,
            "tokens_per_s": said.tokens_per_s or None,
            "grad_norm": said.norm,
        }
        self._record("window", row)


def _early(why: str) -> messages.Trouble:
    """Parties' last word of a run that was not brought to its end: to each of them it is another node that failed."""
    return messages.Trouble(NetworkError.exit_code, f"The run ended early: {why}"[:REASON])
