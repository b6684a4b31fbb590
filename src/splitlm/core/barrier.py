"""The two-phase barrier as one state table without I/O: for a changed cut at a window's end, and for training windows.

One leader, one or more followers. The leader says PREPARE; each follower answers READY or NACK; after every READY the
leader decides COMMIT, and each follower applies and says DONE. A NACK or a timeout before the decision is an ABORT.

What holds, whatever the network loses, repeats or reorders (tests/core/test_barrier.py):

- nobody applies what the leader did not commit, and the leader commits only after every READY;
- after READY no follower decides alone: without word from the leader it stops, its state unknown; after COMMIT there is
  no ABORT;
- barriers are numbered and epochs only grow; only a COMMIT with moves raises the epoch; repeated and old messages
  change nothing.

``step(state, event)`` returns the next state and what its driver has to do. States, events and actions are values.
The protocol is two-phase commit: Gray, Notes on Data Base Operating Systems, 1978.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import msgspec

from splitlm.core.barrier_rows import FOLLOWER, LEADER, Does, On, Role, Row, Where, Which

Table = Mapping[tuple[Role, Where, On, Which], Row]
REASONED: frozenset[Does] = frozenset(
    ("say NACK", "say ABORT", "discard", "stop: peer lost", "stop: state unknown", "stop: violation")
)
"""What is done with a reason."""
MESSAGES: tuple[On, ...] = ("PREPARE", "READY", "NACK", "COMMIT", "DONE", "ABORT")


class Event(msgspec.Struct, frozen=True):
    """Something that happened to one process.

    Attributes:
        on: a message that came (capitals), or what happened here: ``begin`` (leader: a new barrier), ``ready`` or
            ``failed`` (the follower's work), ``applied``, ``told`` (leader: every ABORT was sent), ``timeout``,
            ``lost`` (the way to ``node``).
        seq: the barrier it belongs to.
        epoch: of PREPARE and COMMIT, and of ``begin``.
        node: whom it came from; 0 is the head.
        reason: in words.
    """

    on: On
    seq: int = 0
    epoch: int = 0
    node: int = 0
    reason: str = ""


class Action(msgspec.Struct, frozen=True):
    """Something for the driver to do; a leader says it to every follower, a follower to the leader."""

    does: Does
    seq: int
    epoch: int
    reason: str = ""


class Follower(msgspec.Struct, frozen=True):
    """The state of one follower.

    Attributes:
        where: row of the table.
        epoch: that serves here.
        seq: newest barrier heard of.
        proposed: epoch that this barrier would bring.
        applied: newest barrier that was applied here; −1 before the first.
    """

    where: Where = "idle"
    epoch: int = 0
    seq: int = 0
    proposed: int = 0
    applied: int = -1


class Leader(msgspec.Struct, frozen=True):
    """The state of the leader.

    Attributes:
        followers: who takes part.
        where: row of the table.
        epoch: decided last.
        seq: newest barrier.
        proposed: epoch that this barrier would bring.
        applied: newest barrier that was committed; −1 before the first.
        waiting: who has not answered yet.
    """

    followers: frozenset[int]
    where: Where = "idle"
    epoch: int = 0
    seq: int = 0
    proposed: int = 0
    applied: int = -1
    waiting: frozenset[int] = frozenset()


def compiled(role: Role, rows: tuple[Row, ...]) -> dict[tuple[Role, Where, On, Which], Row]:
    """Rows by what they answer to.

    Raises:
        RuntimeError: two rows answer to the same.
    """
    table: dict[tuple[Role, Where, On, Which], Row] = {}
    for row in rows:
        for where in row.states:
            for which in row.which:
                if (role, where, row.on, which) in table:
                    raise RuntimeError(f"two rows for {role} {where} {row.on} {which}")
                table[role, where, row.on, which] = row
    return table


TABLE: Table = compiled("follower", FOLLOWER) | compiled("leader", LEADER)


@overload
def step(state: Follower, event: Event, table: Table = ...) -> tuple[Follower, tuple[Action, ...]]: ...
@overload
def step(state: Leader, event: Event, table: Table = ...) -> tuple[Leader, tuple[Action, ...]]: ...
def step(state: Follower | Leader, event: Event, table: Table = TABLE) -> tuple[Follower | Leader, tuple[Action, ...]]:
    """One step: the state after an event, and what is to be done, in order.

    Raises:
        RuntimeError: a barrier was begun before the last one was over, or a message came that this role never gets.
    """
    if state.where == "stopped":
        return state, ()
    role: Role = "follower" if isinstance(state, Follower) else "leader"
    row = table.get((role, state.where, event.on, _which(state, event)))
    if row is None:
        if event.on == "begin" or event.on in MESSAGES:
            raise RuntimeError(f"a {role} in state {state.where} cannot take {event}")
        return state, ()  # a timer or a piece of work that ended after its barrier was over
    after = _changed(state, event, row)
    reason = _reason(state, event, row) if REASONED.intersection(row.does) else ""
    return after, tuple(Action(does, after.seq, after.proposed, reason) for does in row.does)


def _which(state: Follower | Leader, event: Event) -> Which:
    """How the event's barrier relates to the state's."""
    if event.on == "lost":
        return ""
    if event.seq < state.seq:
        return "older"
    if event.seq > state.seq:
        fits = event.epoch in (state.epoch, state.epoch + 1)
        return "bad epoch" if event.on == "PREPARE" and not fits else "newer"
    if state.where == "idle":
        return "applied" if state.applied == state.seq else "dropped"
    if event.on == "COMMIT" and event.epoch != state.proposed:
        return "bad epoch"
    if isinstance(state, Leader) and event.on in MESSAGES:
        if event.node not in state.waiting:
            return "repeat"
        return "all" if len(state.waiting) == 1 else "more"
    return "same"


def _changed(state: Follower | Leader, event: Event, row: Row) -> Follower | Leader:
    changes: dict[str, object] = {} if row.then is None else {"where": row.then}
    for what in row.sets:
        match what:
            case "take":
                changes |= {"seq": event.seq, "proposed": event.epoch}
            case "serve" | "decide":
                changes |= {"epoch": state.proposed, "applied": state.seq}
            case "note" if isinstance(state, Leader):
                changes["waiting"] = state.waiting - {event.node}
            case "await all" if isinstance(state, Leader):
                changes["waiting"] = state.followers
            case _:
                raise RuntimeError(f"a follower cannot {what}")
    return msgspec.structs.replace(state, **changes)


def _reason(state: Follower | Leader, event: Event, row: Row) -> str:
    """What happened, who is at fault, in which state and barrier: why it refused, aborted or stopped."""
    head = isinstance(state, Follower)
    peer = "The head" if head else f"Node {event.node}"
    because = f": {event.reason.rstrip('. ')}" if event.reason else ""
    match event.on:
        case "timeout" if isinstance(state, Leader):
            names = ", ".join(map(str, sorted(state.waiting)))
            awaited = "READY" if state.where == "gathering" else "DONE"
            what = f"Node{'s' * (len(state.waiting) > 1)} {names} did not say {awaited} in time"
        case "timeout" if state.where == "prepared":
            what = "The head said neither COMMIT nor ABORT in time"
        case "timeout":
            what = "The stage was not ready in time"
        case "lost":
            what = f"{peer} was lost{because}"
        case "failed" if state.where == "preparing":
            return event.reason.rstrip(". ")
        case "failed":
            what = f"This stage failed{because}"
        case "NACK":
            what = f"{peer} refused{because}"
        case "PREPARE" if "say NACK" in row.does:
            return f"Epoch {event.epoch} was proposed while epoch {state.epoch} serves"
        case "ABORT":
            return f"Aborted{because}"
        case _:
            what = f"{peer} said {event.on} of barrier {event.seq} out of turn"
    place = f" in state '{state.where}' of barrier {state.seq}" if state.where != "idle" else " in state 'idle'"
    return what + place + ("; state unknown" if "stop: state unknown" in row.does else "")


def markdown() -> str:
    """The table as Markdown, for docs/protocol.md."""
    lines = []
    for title, rows in (("Follower", FOLLOWER), ("Leader", LEADER)):
        lines += ["", f"**{title}**", "", "| in state | on | which | then | does | why |", "|---|---|---|---|---|---|"]
        for row in rows:
            states, which = ", ".join(f"`{s}`" for s in row.states), ", ".join(row.which)
            then = f"`{row.then}`" if row.then else "·"
            lines.append(f"| {states} | {row.on} | {which} | {then} | {', '.join(row.does)} | {row.why} |")
    return "\n".join(lines[1:]) + "\n"


def mermaid() -> str:
    """The changes of state as two Mermaid diagrams, for docs/protocol.md; what stops a process is in the table."""
    parts = []
    for rows in (FOLLOWER, LEADER):
        arrows: dict[tuple[Where, Where], list[str]] = {}
        for row in rows:
            for where in row.states:
                if row.then is not None and row.then not in (where, "stopped"):
                    arrows.setdefault((where, row.then), []).append(row.on)
        lines = ["```mermaid", "stateDiagram-v2", "    [*] --> idle"]
        lines += [f"    {a} --> {b}: {', '.join(dict.fromkeys(on))}" for (a, b), on in arrows.items()]
        parts.append("\n".join([*lines, "```"]))
    return "\n\n".join(parts) + "\n"
