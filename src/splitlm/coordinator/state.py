"""What the coordinator knows, and what can happen to it; all values."""

from __future__ import annotations

from typing import Literal

import msgspec

from splitlm.core import messages
from splitlm.core.barrier import Action, Leader
from splitlm.core.cut import Cut
from splitlm.telemetry.record import Window

Kind = Literal["noop", "forced-shift", "auto"]


class Decision(msgspec.Struct, frozen=True):
    """What one barrier proposes.

    Attributes:
        kind: why; ``noop`` moves nothing.
        cut: the next one, with the next epoch; None where nothing moves.
        predicted_ms: what it is expected to gain per token.
    """

    kind: Kind = "noop"
    cut: Cut | None = None
    predicted_ms: float | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a barrier ended.

    Attributes:
        seq: its number.
        committed: whether the decision now holds.
        cut: the one that serves after it.
        epoch: of that cut.
        barrier_ms: from PREPARE to its end, the protocol alone.
        prestage_ms: from PREPARE to the last READY; None when one never came.
        commit_ms: from COMMIT to the last DONE; None after an abort.
        n_acks: how many said READY.
        aborted: whether the old cut serves on.
        reason: why it was aborted: who, and what.
        decision: what was proposed.
    """

    seq: int
    committed: bool
    cut: Cut
    epoch: int
    barrier_ms: float
    prestage_ms: float | None
    commit_ms: float | None
    n_acks: int
    aborted: bool
    reason: str
    decision: Decision

    def record(self, *, drain_ms: float = 0.0) -> Window:
        """The head's record of this barrier; ``drain_ms`` is what the tokens in flight took before it."""
        return Window(
            node=0,
            seq=self.seq,
            epoch=self.epoch,
            decision=self.decision.kind,
            barrier_ms=drain_ms + self.barrier_ms,
            aborted=self.aborted,
            prestage_ms=self.prestage_ms,
            commit_ms=self.commit_ms,
            drain_ms=drain_ms,
            n_acks=self.n_acks,
            reason=self.reason or None,
            predicted_ms=self.decision.predicted_ms,
        )


class State(msgspec.Struct, frozen=True):
    """Everything the coordinator knows.

    Attributes:
        leader: state of the barrier's table.
        cut: the one that serves.
        decision: of the newest barrier.
        announced: cut that is brought in the background, if any.
        staged: followers that have it.
        staging_failed: who could not, and why.
        acks: how many said READY in the newest barrier.
        owed: what the table asked to be done and is not done yet.
        ended: how the newest barrier ended; empty while it runs.
        reason: why it was aborted, or why the coordinator stopped.
    """

    leader: Leader
    cut: Cut
    decision: Decision = Decision()
    announced: Cut | None = None
    staged: frozenset[int] = frozenset()
    staging_failed: str = ""
    acks: int = 0
    owed: tuple[Action, ...] = ()
    ended: Literal["", "committed", "aborted", "lost", "violated"] = ""
    reason: str = ""


class Heard(msgspec.Struct, frozen=True):
    """A follower said something."""

    node: int
    message: messages.Any


class Lost(msgspec.Struct, frozen=True):
    """The way to a follower ended."""

    node: int
    reason: str


class Begin(msgspec.Struct, frozen=True):
    """The head asks for a barrier."""

    decision: Decision


class Announced(msgspec.Struct, frozen=True):
    """The head means to propose this cut later."""

    cut: Cut


class Told(msgspec.Struct, frozen=True):
    """Every follower was sent the ABORT of this barrier."""

    seq: int


class TimedOut(msgspec.Struct, frozen=True):
    """The time for the answers of this barrier is up."""

    seq: int


Input = Heard | Lost | Begin | Announced | Told | TimedOut
"""What can happen to the coordinator."""
