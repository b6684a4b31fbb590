"""What travels through a broker: a message with a few headers that say whose it is and which of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from splitlm.core.errors import ProtocolError, UsageError

MAX_NAME = 80
"""Characters of a run's and of a node's name: a queue's name holds both, and the broker takes 255 bytes."""


class Letter(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The headers of one message of the broker.

    Attributes:
        kind: ``hello`` and ``welcome`` begin, ``say`` carries a message, ``beat`` says that the sender lives, and
            ``bye`` ends.
        peer: a spoke's number, which it draws; the hub's answers carry the same one.
        number: of ``say`` and ``bye``, counted from 1 for each direction of a peer; 0 for the others. What comes twice,
            since a broker that was lost may or may not have had it, is told by this.
        name: of the spoke, in ``hello``.
        host: the sender's address, in ``hello`` and ``welcome``.
    """

    kind: Literal["hello", "welcome", "say", "beat", "bye"]
    peer: str
    number: int = 0
    name: str = ""
    host: str = ""

    @property
    def lasting(self) -> bool:
        """Whether it must outlive the broker's restart."""
        return self.number > 0

    def headers(self) -> dict[str, Any]:
        """As the broker carries them."""
        return msgspec.structs.asdict(self)


def read(headers: Mapping[str, Any]) -> Letter:
    """Headers of a message that came.

    Raises:
        ProtocolError: they are not ours; the field is named.
    """
    try:
        letter = msgspec.convert(dict(headers), Letter, strict=True)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"A message of the broker could not be read: {error}", expected="one of splitlm") from error
    if len(letter.name) > MAX_NAME or len(letter.peer) > MAX_NAME or letter.number < 0:
        raise ProtocolError("A message of the broker has headers out of range", expected=f"at most {MAX_NAME} letters")
    return letter


class Count:
    """The numbers of one direction of a peer, on the side that receives."""

    def __init__(self) -> None:
        self._last = 0

    def new(self, letter: Letter, where: str) -> bool:
        """Whether this letter was not heard before; it then counts as heard.

        Raises:
            ProtocolError: one before it never came.
        """
        if letter.number <= self._last:
            return False
        if letter.number != self._last + 1:
            raise ProtocolError(
                f"Message {self._last + 1} was lost on its way through the broker",
                where=where,
                expected="every message, in order",
                remedy="Check that nobody purges the queues of this run",
            )
        self._last = letter.number
        return True


def hub_queue(run: str) -> str:
    """The queue of a run's hub.

    Raises:
        UsageError: the run has no name, or a long one.
    """
    return f"splitlm.{_checked(run, 'run')}.hub"


def spoke_queue(run: str, name: str, peer: str) -> str:
    """The queue of one spoke; a node that comes again has another one.

    Raises:
        UsageError: run or node have no name, or a long one.
    """
    return f"splitlm.{_checked(run, 'run')}.node.{_checked(name, 'node')}.{peer}"


def _checked(name: str, what: str) -> str:
    if not 0 < len(name.encode()) <= MAX_NAME:
        raise UsageError(f"{name!r} is no name of a {what}", expected=f"1 to {MAX_NAME} bytes")
    return name
