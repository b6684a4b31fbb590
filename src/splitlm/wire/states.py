"""Who may send what, when: one table for the handshake, the data plane and the control plane.

The side that dialled is the *dialler*, the other the *listener*. A data link carries frames one way, from the dialler:
sessions and hidden states to the next stage; on the way home tokens or, when the head's node holds the last segment
too, hidden states. A link that carried one kind never carries the other. The control plane speaks both ways.
"""

from __future__ import annotations

from typing import Literal

from splitlm.core.errors import ProtocolError
from splitlm.wire.frame import (
    Answer,
    Backward,
    Challenge,
    Close,
    Failed,
    Fence,
    Forward,
    Header,
    Hello,
    Hidden,
    Mark,
    Open,
    Piece,
    Refused,
    Rows,
    Said,
    Scored,
    Token,
    Welcome,
    Whole,
)

Purpose = Literal["data", "control", "move", "activation", "gradient", "state"]
Role = Literal["dialler", "listener"]
State = Literal[
    "new",
    "greeted",
    "challenged",
    "answered",
    "linked",
    "sessions",
    "tokens",
    "talking",
    "moving",
    "forwards",
    "backwards",
    "states",
    "refused",
]

PURPOSES: tuple[Purpose, ...] = ("data", "control", "move", "activation", "gradient", "state")
MEANING: dict[State, str] = {
    "new": "connected, nothing was said",
    "greeted": "the dialler said what it wants",
    "challenged": "the listener proved that it knows the token",
    "answered": "the dialler proved it too, and made its claims",
    "linked": "data plane, no frame yet",
    "sessions": "data plane, towards the next stage (or home, in a private ring)",
    "tokens": "data plane, the way home",
    "talking": "control plane",
    "moving": "between neighbours that move blocks",
    "forwards": "training: what parts hand on",
    "backwards": "training: gradients on their way back",
    "states": "training: between a party and the aggregator",
    "refused": "one side refused; the connection closes",
}
OPEN: dict[Purpose, State] = {
    "data": "linked",
    "control": "talking",
    "move": "moving",
    "activation": "forwards",
    "gradient": "backwards",
    "state": "states",
}
"""The state in which a finished handshake leaves a connection."""


def _refusals(*states: State) -> dict[tuple[State, Role, type[Header]], State]:
    """Either side may refuse at any time; a stream that is not understood is refused too."""
    roles: tuple[Role, ...] = ("dialler", "listener")
    return {(state, role, Refused): "refused" for state in states for role in roles}


_HANDSHAKE: dict[tuple[State, Role, type[Header]], State] = {
    ("new", "dialler", Hello): "greeted",
    ("greeted", "listener", Challenge): "challenged",
    ("challenged", "dialler", Answer): "answered",
    **_refusals("new", "greeted", "challenged", "answered"),
}
_DATA: dict[tuple[State, Role, type[Header]], State] = {
    ("answered", "listener", Welcome): "linked",
    ("linked", "dialler", Open): "sessions",
    ("linked", "dialler", Token): "tokens",
    ("linked", "dialler", Fence): "linked",
    ("linked", "dialler", Failed): "tokens",
    ("sessions", "dialler", Open): "sessions",
    ("sessions", "dialler", Hidden): "sessions",
    ("sessions", "dialler", Close): "sessions",
    ("sessions", "dialler", Fence): "sessions",
    ("sessions", "dialler", Failed): "sessions",
    ("tokens", "dialler", Token): "tokens",
    ("tokens", "dialler", Fence): "tokens",
    ("tokens", "dialler", Failed): "tokens",
    **_refusals("linked", "sessions", "tokens"),
}
_CONTROL: dict[tuple[State, Role, type[Header]], State] = {
    ("answered", "listener", Welcome): "talking",
    ("talking", "dialler", Said): "talking",
    ("talking", "listener", Said): "talking",
    **_refusals("talking"),
}
_MOVE: dict[tuple[State, Role, type[Header]], State] = {
    ("answered", "listener", Welcome): "moving",
    ("moving", "dialler", Rows): "moving",
    ("moving", "dialler", Mark): "moving",
    ("moving", "listener", Rows): "moving",
    ("moving", "listener", Mark): "moving",
    **_refusals("moving"),
}


def _both(state: State, *kinds: type[Header]) -> dict[tuple[State, Role, type[Header]], State]:
    """A state in which either side may send these, and stays."""
    roles: tuple[Role, ...] = ("dialler", "listener")
    return {
        ("answered", "listener", Welcome): state,
        **{(state, role, kind): state for role in roles for kind in kinds},
        **_refusals(state),
    }


_ACTIVATION = _both("forwards", Forward)
_GRADIENT = _both("backwards", Backward, Scored)
_STATE = _both("states", Piece, Whole)
TABLE: dict[Purpose, dict[tuple[State, Role, type[Header]], State]] = {
    "data": _HANDSHAKE | _DATA,
    "control": _HANDSHAKE | _CONTROL,
    "move": _HANDSHAKE | _MOVE,
    "activation": _HANDSHAKE | _ACTIVATION,
    "gradient": _HANDSHAKE | _GRADIENT,
    "state": _HANDSHAKE | _STATE,
}
"""``TABLE[purpose][state, sender, kind of frame]`` is the next state; what is not in it is not allowed."""


class Turns:
    """The state of one connection; both sides step the same table with every frame they send or receive."""

    def __init__(self, purpose: Purpose, state: State = "new") -> None:
        self.purpose = purpose
        self.state = state

    def allowed(self, sender: Role) -> tuple[str, ...]:
        """The kinds of frame that ``sender`` may send now."""
        return tuple(
            kind.__name__ for state, role, kind in TABLE[self.purpose] if state == self.state and role == sender
        )

    def step(self, sender: Role, header: Header, where: str = "") -> None:
        """Take one frame of ``sender`` into account.

        Raises:
            ProtocolError: it is out of turn; the state and what it allows are named, and the state stays.
        """
        self.state = self.check(sender, header, where)

    def check(self, sender: Role, header: Header, where: str = "") -> State:
        """The state after a frame of ``sender``, which is not taken into account.

        Raises:
            ProtocolError: it is out of turn.
        """
        after = TABLE[self.purpose].get((self.state, sender, type(header)))
        if after is None:
            raise ProtocolError(
                f"A {type(header).__name__} frame from the {sender} in state '{self.state}' of a {self.purpose} link",
                where=where,
                expected=" or ".join(self.allowed(sender)) or f"nothing from the {sender} in this state",
            )
        return after


def markdown() -> str:
    """The tables as Markdown, for docs/protocol.md."""
    lines = ["| state | meaning |", "|---|---|"]
    lines += [f"| `{state}` | {meaning} |" for state, meaning in MEANING.items()]
    for title, table in (
        ("Handshake", _HANDSHAKE),
        ("Data plane", _DATA),
        ("Control plane", _CONTROL),
        ("Moves", _MOVE),
        ("Training, activations", _ACTIVATION),
        ("Training, gradients", _GRADIENT),
        ("Training, states", _STATE),
    ):
        lines += ["", f"**{title}**", "", "| in state | the | may send | then the state is |", "|---|---|---|---|"]
        lines += [
            f"| `{state}` | {role} | `{kind.__name__}` | `{after}` |" for (state, role, kind), after in table.items()
        ]
    return "\n".join(lines) + "\n"
