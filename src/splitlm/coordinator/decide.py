"""What the coordinator says: from what it owes to messages. Pure."""

from __future__ import annotations

from splitlm.coordinator.state import State
from splitlm.core.barrier import Action
from splitlm.core.errors import NetworkError
from splitlm.core.messages import Abort, Commit, Finish, Message, Prepare, Trouble

MAX_REASON = 2000
"""Characters of a reason that travel; a message is small."""


def decide(state: State) -> list[tuple[int, Message]]:
    """The messages for what is owed, with their receivers, in the order in which they are to be sent."""
    # The head's own stage last: it works in this process, and the others can do so meanwhile.
    nodes = sorted(state.leader.followers, key=lambda node: (node == 0, node))
    said = []
    for action in state.owed:
        message = _message(state, action)
        if message is not None:
            # The head's own stage hears of a stop from the head itself.
            said += [(node, message) for node in nodes if node or not isinstance(message, Trouble)]
    return said


def _message(state: State, action: Action) -> Message | None:
    match action.does:
        case "say PREPARE":
            return Prepare(action.seq, action.epoch, state.decision.kind, state.decision.cut)
        case "say COMMIT":
            return Commit(action.seq, action.epoch)
        case "say ABORT":
            return Abort(action.seq, action.reason[:MAX_REASON])
        case "report committed" if state.decision.cut is not None:
            return Finish(action.seq)
        case "stop: peer lost" | "stop: state unknown" | "stop: violation":
            return Trouble(NetworkError.exit_code, action.reason[:MAX_REASON])
        case _:
            return None
