"""The rows of the two-phase barrier: in this state, on this event, go there and do that. ``barrier.py`` walks them.

Messages are in capitals (READY is ``messages.Prepared``), what happens inside a process in small letters. The column
*which* tells how the event's barrier relates to the newest one this process knows:

``older``, ``same``, ``newer``; in ``idle`` the newest one is over, so ``same`` is told apart as ``applied`` or
``dropped`` (aborted or refused); ``bad epoch``: otherwise fine, but neither today's epoch nor the one after it.
Answers to the leader are ``more`` (others are still awaited), ``all`` (it was the last one) or ``repeat``.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["follower", "leader"]
Where = Literal["idle", "preparing", "prepared", "committed", "gathering", "committing", "aborting", "stopped"]
On = Literal[
    "PREPARE",
    "READY",
    "NACK",
    "COMMIT",
    "DONE",
    "ABORT",
    "begin",
    "ready",
    "failed",
    "applied",
    "told",
    "timeout",
    "lost",
]
Which = Literal["", "older", "dropped", "applied", "same", "newer", "bad epoch", "more", "all", "repeat"]
Sets = Literal["take", "serve", "note", "await all", "decide"]
"""Changes of the state. take: the event's barrier is now the newest. serve: the new epoch serves here. note: this node
answered. await all: every follower is to answer. decide: the new epoch is decided."""
Does = Literal[
    "prepare",
    "discard",
    "apply",
    "start timer",
    "stop timer",
    "say PREPARE",
    "say READY",
    "say NACK",
    "say COMMIT",
    "say DONE",
    "say ABORT",
    "report committed",
    "report aborted",
    "stop: peer lost",
    "stop: state unknown",
    "stop: violation",
]
"""What the driver is to do, in this order."""


class Row(NamedTuple):
    """One row; ``then`` None stays where it is."""

    states: tuple[Where, ...]
    on: On
    which: tuple[Which, ...] = ("",)
    then: Where | None = None
    sets: tuple[Sets, ...] = ()
    does: tuple[Does, ...] = ()
    why: str = ""


PREPARING: tuple[Does, ...] = ("start timer", "prepare")
VIOLATION: tuple[Does, ...] = ("stop: violation",)
UNKNOWN: tuple[Does, ...] = ("stop: state unknown",)
OVER: tuple[Which, ...] = ("older", "dropped", "applied")
ACTIVE: tuple[Where, ...] = ("preparing", "prepared")
RUNNING: tuple[Where, ...] = ("preparing", "prepared", "committed")

FOLLOWER: tuple[Row, ...] = (
    Row(("idle",), "PREPARE", ("newer",), "preparing", ("take",), PREPARING),
    Row(("idle",), "PREPARE", ("bad epoch",), None, ("take",), ("say NACK",)),
    Row(("idle",), "PREPARE", OVER, why="repeated, or overtaken by its ABORT"),
    Row(("idle",), "COMMIT", ("applied",), does=("say DONE",), why="repeated"),
    Row(("idle",), "COMMIT", ("older",), why="repeated"),
    Row(("idle",), "COMMIT", ("dropped", "newer"), "stopped", does=VIOLATION, why="never READY for it"),
    Row(("idle",), "ABORT", ("newer",), None, ("take",), why="overtook its PREPARE, which is then dropped"),
    Row(("idle",), "ABORT", ("older", "dropped"), why="repeated"),
    Row(("idle",), "ABORT", ("applied",), "stopped", does=VIOLATION, why="after COMMIT there is no ABORT"),
    Row(("idle",), "lost", then="stopped", does=("stop: peer lost",)),
    Row(("preparing",), "ready", ("same",), "prepared", does=("start timer", "say READY")),
    Row(("preparing",), "failed", ("same",), "idle", does=("stop timer", "discard", "say NACK")),
    Row(("preparing",), "timeout", ("same",), "idle", does=("discard", "say NACK"), why="not READY yet: may refuse"),
    Row(("preparing",), "PREPARE", ("same",), why="repeated; READY follows"),
    Row(("preparing",), "COMMIT", ("same", "bad epoch", "newer"), "stopped", does=VIOLATION, why="READY was not said"),
    Row(("preparing",), "lost", then="stopped", does=("stop timer", "discard", "stop: peer lost")),
    Row(("prepared",), "PREPARE", ("same",), does=("say READY",), why="repeated"),
    Row(("prepared",), "COMMIT", ("same",), "committed", does=("stop timer", "apply")),
    Row(("prepared",), "COMMIT", ("bad epoch", "newer"), "stopped", does=VIOLATION, why="READY was for another"),
    Row(("prepared",), "timeout", ("same",), "stopped", does=UNKNOWN, why="after READY no stage decides alone"),
    Row(("prepared",), "lost", then="stopped", does=("stop timer", "stop: state unknown"), why="the others may go on"),
    Row(
        ACTIVE,
        "PREPARE",
        ("newer",),
        "preparing",
        ("take",),
        ("discard", *PREPARING),
        "without our DONE the one before was not committed, so it was aborted",
    ),
    Row(ACTIVE, "PREPARE", ("bad epoch",), "idle", ("take",), ("stop timer", "discard", "say NACK")),
    Row(ACTIVE, "ABORT", ("same",), "idle", does=("stop timer", "discard")),
    Row(ACTIVE, "ABORT", ("newer",), "idle", ("take",), ("stop timer", "discard"), "both are over"),
    Row(("committed",), "applied", ("same",), "idle", ("serve",), ("say DONE",)),
    Row(("committed",), "failed", ("same",), "stopped", does=UNKNOWN, why="the others apply it"),
    Row(("committed",), "COMMIT", ("same",), why="repeated; DONE follows"),
    Row(("committed",), "PREPARE", ("same",), why="repeated"),
    Row(("committed",), "PREPARE", ("newer", "bad epoch"), "stopped", does=VIOLATION, why="DONE was not said"),
    Row(("committed",), "COMMIT", ("newer", "bad epoch"), "stopped", does=VIOLATION, why="DONE was not said"),
    Row(("committed",), "ABORT", ("same", "newer"), "stopped", does=VIOLATION, why="after COMMIT there is no ABORT"),
    Row(("committed",), "lost", then="stopped", does=UNKNOWN, why="whether the others apply it is not known"),
    Row(RUNNING, "PREPARE", ("older",), why="repeated"),
    Row(RUNNING, "COMMIT", ("older",), why="repeated"),
    Row(RUNNING, "ABORT", ("older",), why="repeated"),
)
BUSY: tuple[Where, ...] = ("gathering", "aborting", "committing")
LEADER: tuple[Row, ...] = (
    Row(("idle",), "begin", ("newer",), "gathering", ("take", "await all"), ("start timer", "say PREPARE")),
    Row(("gathering",), "READY", ("more",), None, ("note",)),
    Row(
        ("gathering",),
        "READY",
        ("all",),
        "committing",
        ("await all", "decide"),
        ("start timer", "say COMMIT"),
        "every follower is READY: the one moment of decision",
    ),
    Row(("gathering",), "NACK", ("more", "all"), "aborting", does=("stop timer", "say ABORT")),
    Row(("gathering",), "timeout", ("same",), "aborting", does=("say ABORT",)),
    Row(("gathering",), "lost", then="stopped", does=("stop timer", "say ABORT", "stop: peer lost")),
    Row(("gathering",), "NACK", ("repeat",), "stopped", does=VIOLATION, why="it had said READY"),
    Row(("gathering",), "DONE", ("more", "all", "repeat"), "stopped", does=VIOLATION, why="COMMIT was not said"),
    Row(("aborting",), "told", ("same",), "idle", does=("report aborted",), why="ABORT is on its way to all"),
    Row(("aborting",), "READY", ("more", "all", "repeat"), why="too late"),
    Row(("aborting",), "NACK", ("more", "all", "repeat"), why="one refusal is enough"),
    Row(("aborting",), "DONE", ("more", "all", "repeat"), "stopped", does=VIOLATION, why="COMMIT was not said"),
    Row(("aborting",), "lost", then="stopped", does=("stop: peer lost",), why="nothing was applied"),
    Row(("committing",), "DONE", ("more",), None, ("note",)),
    Row(("committing",), "DONE", ("all",), "idle", ("note",), ("stop timer", "report committed")),
    Row(("committing",), "READY", ("more", "all", "repeat"), why="repeated"),
    Row(("committing",), "NACK", ("more", "all", "repeat"), "stopped", does=VIOLATION, why="it had said READY"),
    Row(("committing",), "timeout", ("same",), "stopped", does=UNKNOWN, why="some applied it, some may not have"),
    Row(("committing",), "lost", then="stopped", does=("stop timer", "stop: state unknown"), why="it may have applied"),
    Row(("gathering",), "READY", ("repeat",), why="repeated"),
    Row(("committing",), "DONE", ("repeat",), why="repeated"),
    Row(("idle",), "READY", ("older", "dropped", "applied"), why="late"),
    Row(("idle",), "NACK", ("older", "dropped"), why="late"),
    Row(("idle",), "NACK", ("applied",), "stopped", does=VIOLATION, why="it had said READY"),
    Row(("idle",), "DONE", ("older", "applied"), why="repeated"),
    Row(("idle",), "DONE", ("dropped",), "stopped", does=VIOLATION, why="COMMIT was not said"),
    Row(("idle",), "lost", then="stopped", does=("stop: peer lost",)),
    Row(BUSY, "READY", ("older",), why="late"),
    Row(BUSY, "NACK", ("older",), why="late"),
    Row(BUSY, "DONE", ("older",), why="repeated"),
    Row(("idle", *BUSY), "READY", ("newer",), "stopped", does=VIOLATION, why="nobody asked"),
    Row(("idle", *BUSY), "NACK", ("newer",), "stopped", does=VIOLATION, why="nobody asked"),
    Row(("idle", *BUSY), "DONE", ("newer",), "stopped", does=VIOLATION, why="nobody asked"),
)
