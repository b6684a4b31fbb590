"""The loop around what the coordinator knows: messages out, deadlines, and the figures of each barrier."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from msgspec.structs import replace

from splitlm.coordinator.apply import apply
from splitlm.coordinator.decide import decide
from splitlm.coordinator.state import Announced, Begin, Decision, Heard, Input, Lost, Outcome, State, TimedOut, Told
from splitlm.core import messages
from splitlm.core.barrier import Leader
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError

CTRL_TIMEOUT_S = 5.0
LEADER_SHARE = 0.75
"""The head's part of the control timeout. A stage waits the whole of it after its READY, so the ABORT of a barrier that
one stage delays reaches the others before their own time is up."""

Send = Callable[[int, messages.Message], Awaitable[None]]


class Coordinator:
    """Leads the barriers of one ring. To be made in a running event loop; one barrier at a time.

    Args:
        send: brings a message to a node; node 0 is the head's own stage.
        followers: every node that takes part, the head's own stage included.
        cut: the one that serves.
        ctrl_timeout_s: how long a stage waits for word; the head waits three quarters of it for READY, and for DONE.
        clock: seconds, for the figures.
    """

    def __init__(
        self,
        send: Send,
        followers: Sequence[int],
        *,
        cut: Cut,
        ctrl_timeout_s: float = CTRL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._timeout_s, self._clock = send, ctrl_timeout_s, clock
        self._state = State(Leader(frozenset(followers), epoch=cut.epoch), cut)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._deadline: float | None = None
        self._began = self._decided = self._ended = 0.0

    @property
    def cut(self) -> Cut:
        """The cut that serves."""
        return self._state.cut

    @property
    def announced(self) -> Cut | None:
        """The cut that the followers bring in the background; None for none."""
        return self._state.announced

    @property
    def staging_failed(self) -> str:
        """Who could not bring it, and why; empty for nobody."""
        return self._state.staging_failed

    @property
    def standing(self) -> str:
        """What it is doing, in words."""
        leader = self._state.leader
        return f"in state '{leader.where}'" + (f" of barrier {leader.seq}" if leader.seq else "")

    @property
    def failure(self) -> NetworkError | None:
        """Why no barrier is possible any more; it names the peer, the state and the barrier."""
        match self._state.ended:
            case "lost":
                return PeerLostError(self._state.reason, remedy="Every stage stops; start the ring again")
            case "violated":
                return ProtocolError(self._state.reason, expected="an answer to what was asked")
            case _:
                return None

    def hear(self, node: int, message: messages.Any) -> None:
        """Take what a follower said: Prepared, Nack, Done, Staged or Trouble.

        Raises:
            ProtocolError: another message, or a node that takes no part.
        """
        self._advance(Heard(node, message))

    def lost(self, node: int, reason: str) -> None:
        """The way to a follower ended: no barrier is possible any more."""
        self._advance(Lost(node, reason))

    async def announce(self, cut: Cut) -> None:
        """Tell every follower of the cut that a coming barrier is to propose, so that they bring it in the background.

        Raises:
            CutError: it cannot follow the one that serves.
            NetworkError: the coordinator has stopped.
        """
        self._advance(Announced(cut))
        await self._say([(node, messages.Announce(cut)) for node in sorted(self._state.leader.followers)])
        await self._stop_if_failed()

    async def staged(self, timeout: float) -> bool:
        """Wait until every follower has what was announced; False when one failed or the time (seconds) is up.

        Raises:
            NetworkError: the coordinator has stopped.
        """
        cut, until = self._state.announced, self._loop.time() + timeout
        while True:
            changed, state = self._changed, self._state
            await self._stop_if_failed()
            if cut is None or state.announced != cut or state.staging_failed:
                return False
            if state.staged >= state.leader.followers:
                return True
            if not await self._wait(changed, until):
                return False

    async def barrier(self, decision: Decision | None = None) -> Outcome:
        """Run one barrier to its end. Nothing may be in flight on the data plane.

        Raises:
            CutError: the decision's cut cannot follow the one that serves.
            PeerLostError: a follower was lost, or may or may not have applied the cut; the peer and state are named.
            ProtocolError: a follower answered what it was not asked.
        """
        await self._stop_if_failed()
        self._began = self._clock()
        self._advance(Begin(decision or Decision()))
        while True:
            changed = self._changed
            await self._pay()
            await self._stop_if_failed()
            if self._state.owed:
                continue
            if self._state.ended:
                return self._outcome()
            if not await self._wait(changed, self._deadline):
                self._advance(TimedOut(self._state.leader.seq))

    def _advance(self, happened: Input) -> None:
        before = self._state
        self._state = after = apply(before, happened)
        for action in after.owed[len(before.owed) :]:
            if action.does == "start timer":
                self._deadline = self._loop.time() + LEADER_SHARE * self._timeout_s
            elif action.does == "stop timer":
                self._deadline = None
        if after.leader.where != before.leader.where:
            if after.leader.where == "committing":
                self._decided = self._clock()
            self._ended = self._clock()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pay(self) -> None:
        """Send what is owed."""
        state, said = self._state, decide(self._state)
        self._state = replace(state, owed=())
        await self._say(said)
        if any(action.does == "say ABORT" for action in state.owed):
            self._advance(Told(state.leader.seq))

    async def _say(self, said: Sequence[tuple[int, messages.Message]]) -> None:
        """Send these; who cannot be reached is lost."""
        rest = deque(said)
        while rest:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while rest:
                        await self._send(*rest[0])
                        rest.popleft()
            except NetworkError as error:
                self.lost(rest.popleft()[0], str(error))
            except TimeoutError:
                node, message = rest.popleft()
                self.lost(node, f"It took no {type(message).__name__} message in {self._timeout_s:g} s")

    async def _wait(self, changed: asyncio.Event, until: float | None) -> bool:
        """Wait for a change; whether it came in time."""
        try:
            async with asyncio.timeout_at(until):
                await changed.wait()
        except TimeoutError:
            return False
        return True

    async def _stop_if_failed(self) -> None:
        failure = self.failure
        if failure is not None:
            await self._pay()
            raise failure

    def _outcome(self) -> Outcome:
        state = self._state
        committed = state.ended == "committed"
        return Outcome(
            seq=state.leader.seq,
            committed=committed,
            cut=state.cut,
            epoch=state.cut.epoch,
            barrier_ms=(self._ended - self._began) * 1e3,
            prestage_ms=(self._decided - self._began) * 1e3 if committed else None,
            commit_ms=(self._ended - self._decided) * 1e3 if committed else None,
            n_acks=state.acks,
            aborted=not committed,
            reason="" if committed else state.reason,
            decision=state.decision,
        )
