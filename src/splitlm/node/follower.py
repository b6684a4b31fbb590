"""A stage's part in barriers: the driver around the follower's table. It knows messages and deadlines, no blocks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from splitlm.core import messages as m
from splitlm.core.barrier import Action, Event, step
from splitlm.core.barrier import Follower as FollowerState
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, PeerLostError, ProtocolError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.telemetry.record import Window

CTRL_TIMEOUT_S = 5.0
MAX_REASON = 2000
"""Characters of a reason that travel; a message is small."""

Say = Callable[[m.Message], Awaitable[None]]


class Work(Protocol):
    """What a stage does for a barrier. The driver never runs two of these at once, but ``announced`` beside a noop."""

    async def announced(self, cut: Cut) -> None:
        """In the background, while tokens flow: bring what this cut needs. Cancelled when another cut is announced, or
        when the barrier that proposes it is aborted."""
        ...

    async def prepare(self, prepare: m.Prepare) -> None:
        """Tokens stand still: bring the rest. Cancelled by an abort.

        Raises:
            SplitlmError, OSError, MemoryError: it cannot be done; the barrier is aborted with this reason.
        """
        ...

    async def commit(self, cut: Cut | None) -> None:
        """From now on this cut serves; None where nothing moves. Keep what is given away until ``finish``."""
        ...

    async def abort(self) -> None:
        """Drop what ``prepare`` brought, and ``announced`` for that cut; the old cut serves on."""
        ...

    async def finish(self) -> None:
        """Every stage has applied the last commit: what was given away may be released."""
        ...


@dataclass
class _Barrier:
    """One barrier as this stage lives it; times in seconds."""

    prepare: m.Prepare
    began: float
    ready: float | None = None
    committed: float = 0.0


class Follower:
    """Takes part in the barriers that a coordinator leads. To be made in a running event loop.

    Args:
        say: brings a message to the coordinator.
        work: what this stage does.
        node: this node, for its records.
        epoch: of the cut that serves.
        ctrl_timeout_s: how long to prepare; and how long to wait for word after READY.
        clock: seconds, for the figures.
        record: takes a record of each barrier.
        measure: milliseconds of compute for one token in the window that ended, which READY carries.
    """

    def __init__(
        self,
        say: Say,
        work: Work,
        *,
        node: int = 0,
        epoch: int = 0,
        ctrl_timeout_s: float = CTRL_TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
        record: Callable[[Window], None] = lambda _: None,
        measure: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._measure = measure
        self._say, self._work, self._node, self._timeout_s = say, work, node, ctrl_timeout_s
        self._clock, self._record = clock, record
        self._state = FollowerState(epoch=epoch)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._todo: asyncio.Queue[Action | _Barrier | m.Announce | m.Finish] = asyncio.Queue()
        self._barrier = _Barrier(m.Prepare(0, epoch, "noop"), 0.0)
        self._preparing: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None
        self._finishing: asyncio.Task[None] | None = None
        self._cause: BaseException | None = None

    @property
    def state(self) -> FollowerState:
        """Where this stage stands."""
        return self._state

    @property
    def standing(self) -> str:
        """What this stage is doing, in words; after READY what the others do is not known to it."""
        state = self._state
        words = f"this stage was in state '{state.where}'" + (f" of barrier {state.seq}" if state.seq else "")
        return words + ("; state unknown" if state.where in ("prepared", "committed") else "")

    def hear(self, message: m.Any) -> None:
        """Take what the coordinator said: Announce, Prepare, Commit, Abort, Finish, or Trouble.

        Raises:
            ProtocolError: another message.
        """
        match message:
            case m.Prepare(seq=seq, epoch=epoch):
                self._event(Event("PREPARE", seq, epoch), _Barrier(message, self._clock()))
            case m.Commit(seq=seq, epoch=epoch):
                self._event(Event("COMMIT", seq, epoch))
            case m.Abort(seq=seq, reason=reason):
                self._event(Event("ABORT", seq, reason=reason))
            case m.Announce() | m.Finish():
                self._todo.put_nowait(message)
            case m.Trouble(text=text):
                self.lost(text)
            case _:
                raise ProtocolError(
                    f"A {type(message).__name__} message came from the coordinator",
                    expected="Announce, Prepare, Commit, Abort or Finish",
                )

    def lost(self, reason: str) -> None:
        """The way to the coordinator ended; ``run`` then raises, with the state this stage was in."""
        self._event(Event("lost", reason=reason))

    async def run(self) -> None:
        """Take part until cancelled.

        Raises:
            PeerLostError: the head was lost, or said neither COMMIT nor ABORT in time after READY: state unknown.
            ProtocolError: the head broke the protocol.
            NetworkError: this stage could not apply what was committed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await self._do(await self._todo.get(), group)
        except* SplitlmError as errors:
            raise first_error(errors) from self._cause
        finally:
            self._stop_timer()

    def _event(self, event: Event, proposed: _Barrier | None = None) -> None:
        self._state, actions = step(self._state, event)
        for action in actions:
            match action.does:
                case "start timer":
                    self._stop_timer()
                    late = Event("timeout", action.seq)
                    self._timer = self._loop.call_later(self._timeout_s, self._event, late)
                case "stop timer":
                    self._stop_timer()
                case "prepare" if proposed is not None:
                    self._todo.put_nowait(proposed)
                case _:
                    self._todo.put_nowait(action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _do(self, todo: Action | _Barrier | m.Announce | m.Finish, group: asyncio.TaskGroup) -> None:
        match todo:
            case _Barrier():
                self._barrier = todo
                self._preparing = group.create_task(self._prepare(todo.prepare))
            case m.Announce(cut=cut):
                await _cancel(self._background)
                self._background = group.create_task(self._bring(cut))
            case m.Finish(seq=seq):
                if seq == self._state.applied:
                    self._finishing = group.create_task(self._work.finish())
            case Action():
                await self._act(todo)

    async def _act(self, action: Action) -> None:
        seq, reason = action.seq, action.reason
        match action.does:
            case "discard":
                await _cancel(self._preparing)
                if self._barrier.prepare.cut is not None:
                    await _cancel(self._background)
                await self._work.abort()
                self._write(aborted=True, reason=reason)
            case "apply":
                await self._apply(seq)
            case "say READY":
                self._barrier.ready = self._barrier.ready or self._clock()
                await self._tell(m.Prepared(seq, self._measure()))
            case "say NACK":
                await self._tell(m.Nack(seq, reason[:MAX_REASON]))
            case "say DONE":
                await self._tell(m.Done(seq))
            case "stop: violation":
                raise ProtocolError(reason, expected="the order of docs/protocol.md")
            case "stop: peer lost" | "stop: state unknown":
                kind = NetworkError if self._cause is not None else PeerLostError
                raise kind(reason, remedy="This stage stops; start the ring again")
            case _:
                raise RuntimeError(f"a follower cannot {action.does}")

    async def _bring(self, cut: Cut) -> None:
        reason = ""
        await _ended(self._finishing)
        try:
            await self._work.announced(cut)
        except (SplitlmError, OSError, MemoryError) as error:
            reason = _words(error)
        await self._tell(m.Staged(cut.epoch, reason))

    async def _prepare(self, prepare: m.Prepare) -> None:
        if prepare.cut is not None:
            await _ended(self._background)
            await _ended(self._finishing)
        try:
            await self._work.prepare(prepare)
        except (SplitlmError, OSError, MemoryError) as error:
            self._event(Event("failed", prepare.seq, reason=_words(error)))
        else:
            self._event(Event("ready", prepare.seq))

    async def _apply(self, seq: int) -> None:
        self._barrier.committed = self._clock()
        try:
            await self._work.commit(self._barrier.prepare.cut)
        except (SplitlmError, OSError, MemoryError) as error:
            self._cause = error
            self._event(Event("failed", seq, reason=_words(error)))
        else:
            self._event(Event("applied", seq))
            self._write(aborted=False)

    async def _tell(self, message: m.Message) -> None:
        try:
            await self._say(message)
        except NetworkError as error:
            self.lost(str(error))

    def _write(self, *, aborted: bool, reason: str = "") -> None:
        now, barrier = self._clock(), self._barrier
        self._record(
            Window(
                node=self._node,
                seq=barrier.prepare.seq,
                epoch=self._state.epoch,
                decision=barrier.prepare.decision,
                barrier_ms=(now - barrier.began) * 1e3,
                aborted=aborted,
                prestage_ms=None if barrier.ready is None else (barrier.ready - barrier.began) * 1e3,
                commit_ms=None if aborted else (now - barrier.committed) * 1e3,
                reason=reason or None,
            )
        )


def _words(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:MAX_REASON]


async def _cancel(task: asyncio.Task[None] | None) -> None:
    """End a task of ours, if there is one, and wait for its end."""
    if task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task})


async def _ended(task: asyncio.Task[None] | None) -> None:
    """Wait until a task of ours, if there is one, has ended; its error goes to the task group."""
    if task is not None:
        await asyncio.wait({task})
