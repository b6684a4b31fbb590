"""Windows on the head: laps are counted, and between two windows every stage agrees on what comes next."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Protocol

from splitlm.coordinator.coordinator import Coordinator
from splitlm.coordinator.state import Decision, Outcome
from splitlm.core.cut import Cut, Move, diff, shift
from splitlm.core.shifts import Shift
from splitlm.infer.head import Head
from splitlm.telemetry.sinks import Sink

KEPT = 10_000
"""Boundaries that a ring remembers."""


class Plan(Protocol):
    """Who decides what the next boundary brings."""

    async def announce(self, cut: Cut, boundary: int) -> Cut | None:
        """The cut to bring in the background for the boundary with this number; None for none."""
        ...

    def decide(self, cut: Cut, boundary: int) -> Decision:
        """What is proposed at this boundary."""
        ...

    def happened(self, outcome: Outcome) -> None:
        """How the boundary ended."""
        ...


class Noop:
    """Nothing ever moves."""

    async def announce(self, cut: Cut, boundary: int) -> Cut | None:  # noqa: ARG002 - it is what every plan takes
        """See ``Plan``."""
        return None

    def decide(self, cut: Cut, boundary: int) -> Decision:  # noqa: ARG002
        """See ``Plan``."""
        return Decision()

    def happened(self, outcome: Outcome) -> None:
        """See ``Plan``."""


@dataclass
class ForcedShifts:
    """Moves that the user asked for, each at its boundary; one that was aborted is proposed again.

    Args:
        window: laps per window.
        background: whether they are announced, so that their blocks come while tokens flow.
    """

    shifts: tuple[Shift, ...]
    window: int
    background: bool = True
    _next: int = 0

    async def announce(self, cut: Cut, boundary: int) -> Cut | None:
        """See ``Plan``."""
        return self.decide(cut, boundary).cut if self.background else None

    def decide(self, cut: Cut, boundary: int) -> Decision:
        """See ``Plan``."""
        if self._next == len(self.shifts) or boundary < -(-self.shifts[self._next].at // self.window):
            return Decision()
        asked = self.shifts[self._next]
        return Decision("forced-shift", shift(cut, asked.boundary, asked.k))

    def happened(self, outcome: Outcome) -> None:
        """See ``Plan``."""
        if outcome.committed and outcome.decision.cut is not None:
            self._next += 1


def forced(shifts: Sequence[Shift], window: int, background: bool = True) -> Plan:
    """The plan of a user who asks for these moves, or for none."""
    return ForcedShifts(tuple(shifts), window, background) if shifts else Noop()


@dataclass(frozen=True)
class Boundary:
    """What happened between two windows.

    Attributes:
        number: counted from 1 over the life of the ring.
        laps: of the ring before it: the number of tokens of a session that rode from the beginning.
        drain_ms: until the tokens in flight were home.
        stood_ms: from the last token home until the next lap could start.
        outcome: of the barrier.
        moves: blocks that moved.
        kv_bytes: keys and values that moved with them; the receivers have checked that it was exactly this.
        late: a move was due, and put off because a stage had not brought its blocks yet.
    """

    number: int
    laps: int
    drain_ms: float
    stood_ms: float
    outcome: Outcome
    moves: tuple[Move, ...] = ()
    kv_bytes: int = 0
    late: bool = False

    def extra_ms(self, others: Iterable[Boundary]) -> float | None:
        """How much longer the ring stood than at the median of those without a move; None where there is none."""
        plain = [b.stood_ms for b in others if not b.moves and not b.late and not b.outcome.aborted]
        return self.stood_ms - median(plain) if plain else None


@dataclass
class Windows:
    """Counts laps, and runs a barrier after every ``window`` of them.

    A lap is one token of every session that rides; sessions that join in the middle count from there. There is no
    barrier where nobody waits for another token.

    Attributes:
        boundaries: the newest ``KEPT`` of them.

    Args:
        kv_due: bytes of keys and values that move with these blocks, while the ring stands still.
        patience_s: how long a boundary waits for blocks that are still being brought.
    """

    head: Head
    coordinator: Coordinator
    plan: Plan
    window: int
    sink: Sink
    kv_due: Callable[[Sequence[Move]], int]
    patience_s: float
    boundaries: deque[Boundary] = field(default_factory=lambda: deque(maxlen=KEPT))

    def __post_init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._riding, self._due = asyncio.Event(), asyncio.Event()
        self._number = 0
        self._laps = 0
        self.head.on_lap = self.lap

    def lap(self, session: int) -> None:
        """A session is about to take another lap; called by the head, on the loop."""
        live = set(self.head.sessions)
        self._counts = {s: n for s, n in self._counts.items() if s in live}
        self._counts[session] = self._counts.get(session, 0) + 1
        self._riding.set()
        if self._counts[session] >= self.window and not self._due.is_set():
            self.head.hold()
            self._due.set()

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            NetworkError: a stage was lost, or may or may not have applied a cut.
        """
        while True:
            await self._riding.wait()  # not before: what is announced to an idle ring finds no KV to bring
            await self._announce()
            await self._due.wait()
            await self._boundary()
            self._counts.clear()
            self._riding.clear()
            self._due.clear()
            self.head.resume()

    async def _announce(self) -> None:
        coming = await self.plan.announce(self.coordinator.cut, self._number + 1)
        if coming is not None and coming != self.coordinator.announced:
            await self.coordinator.announce(coming)

    async def _boundary(self) -> None:
        self._number += 1
        self._laps += self.window
        began = time.perf_counter()
        await self.head.drained()
        drained = time.perf_counter()
        before = self.coordinator.cut
        wanted = decision = self.plan.decide(before, self._number)
        if wanted.cut is not None and not await self._brought(wanted.cut):
            decision = Decision()
        moves = () if decision.cut is None else diff(before, decision.cut)
        due = self.kv_due(moves)
        outcome = await self.coordinator.barrier(decision)
        self.plan.happened(outcome)
        drain_ms = (drained - began) * 1e3
        self.sink.write(outcome.record(drain_ms=drain_ms))
        self.boundaries.append(
            Boundary(
                self._number,
                self._laps,
                drain_ms,
                (time.perf_counter() - drained) * 1e3,
                outcome,
                moves if outcome.committed else (),
                due if outcome.committed else 0,
                late=decision is not wanted,
            )
        )

    async def _brought(self, cut: Cut) -> bool:
        """Whether this cut may be proposed: not while it is still being brought, which an abort would undo.

        Who failed to bring it is asked all the same, and refuses: the reason is then on record.
        """
        if self.coordinator.announced != cut:
            return True
        return await self.coordinator.staged(self.patience_s) or bool(self.coordinator.staging_failed)
