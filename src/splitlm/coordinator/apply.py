"""One step of what the coordinator knows: ``apply(state, input) -> state``. Pure."""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from splitlm.coordinator.state import Announced, Begin, Heard, Input, Lost, State, TimedOut, Told
from splitlm.core import messages as m
from splitlm.core.barrier import Event, step
from splitlm.core.cut import Cut, diff
from splitlm.core.errors import CutError, ProtocolError, UsageError
from splitlm.core.training import TrainingMessage


def apply(state: State, happened: Input) -> State:
    """The state after this; what is to be done for it is in ``owed``.

    Raises:
        CutError: a decision whose cut cannot follow the one that serves.
        ProtocolError: a message that followers do not send to a coordinator, or a node that is none.
    """
    match happened:
        case Heard(node=node, message=message):
            if node not in state.leader.followers:
                raise ProtocolError(
                    f"Node {node} takes no part in the barrier", expected=f"one of {sorted(state.leader.followers)}"
                )
            return _heard(state, node, message)
        case Lost(node=node, reason=reason):
            return _step(state, Event("lost", node=node, reason=reason))
        case Begin(decision=decision):
            if (decision.kind == "noop") != (decision.cut is None):
                raise UsageError(f"A {decision.kind} decision", expected="a cut if and only if something moves")
            if decision.cut is not None:
                check_successor(state.cut, decision.cut)
            epoch = state.cut.epoch if decision.cut is None else decision.cut.epoch
            fresh = replace(state, decision=decision, acks=0, ended="", reason="")
            return _step(fresh, Event("begin", state.leader.seq + 1, epoch))
        case Announced(cut=cut):
            check_successor(state.cut, cut)
            return replace(state, announced=cut, staged=frozenset(), staging_failed="")
        case Told(seq=seq):
            return _step(state, Event("told", seq))
        case TimedOut(seq=seq):
            return _step(state, Event("timeout", seq))
        case _:
            assert_never(happened)


def check_successor(old: Cut, new: Cut) -> None:
    """Whether a cut may follow another one.

    Raises:
        CutError: of another model or epoch, nothing moves, or a move that ``core.cut.diff`` refuses.
    """
    if new.epoch != old.epoch + 1:
        raise CutError(f"A cut of epoch {new.epoch} cannot follow one of epoch {old.epoch}", expected="the next epoch")
    if not diff(old, new):
        raise CutError(f"The cut of epoch {new.epoch} moves no block", expected="a noop decision")


def _heard(state: State, node: int, message: m.Any) -> State:
    match message:
        case m.Prepared(seq=seq):
            counts = state.leader.where == "gathering" and seq == state.leader.seq and node in state.leader.waiting
            return _step(replace(state, acks=state.acks + counts), Event("READY", seq, node=node))
        case m.Nack(seq=seq, reason=reason):
            return _step(state, Event("NACK", seq, node=node, reason=reason))
        case m.Done(seq=seq):
            return _step(state, Event("DONE", seq, node=node))
        case m.Staged(epoch=epoch, reason=reason):
            if state.announced is None or epoch != state.announced.epoch:
                return state
            if reason:
                return replace(state, staging_failed=f"Node {node}: {reason}")
            return replace(state, staged=state.staged | {node})
        case m.Trouble(text=text):
            return _step(state, Event("lost", node=node, reason=text))
        case (
            m.Join()
            | m.Assign()
            | m.Loaded()
            | m.Connect()
            | m.Ready()
            | m.Stop()
            | m.Report()
            | m.Ping()
            | m.Announce()
            | m.Prepare()
            | m.Commit()
            | m.Abort()
            | m.Finish()
            | TrainingMessage()
        ):
            raise ProtocolError(
                f"Node {node} sent a {type(message).__name__} message to the coordinator",
                expected="Prepared, Nack, Done, Staged or Trouble",
            )
        case _:
            assert_never(message)


def _step(state: State, event: Event) -> State:
    """Walk the barrier's table; what it reports becomes part of the state."""
    leader, actions = step(state.leader, event)
    state = replace(state, leader=leader, owed=(*state.owed, *actions))
    for action in actions:
        match action.does:
            case "report committed":
                moved = state.decision.cut is not None
                state = replace(state, ended="committed", cut=state.decision.cut or state.cut)
                if moved:
                    state = replace(state, announced=None, staged=frozenset())
            case "report aborted":
                state = replace(state, ended="aborted")
                if state.decision.cut is not None:
                    state = replace(state, announced=None, staged=frozenset())
            case "say ABORT":
                state = replace(state, reason=action.reason)
            case "stop: peer lost" | "stop: state unknown":
                state = replace(state, ended="lost", reason=action.reason)
            case "stop: violation":
                state = replace(state, ended="violated", reason=action.reason)
            case _:
                pass  # messages and timers: decide.py and the loop
    return state
