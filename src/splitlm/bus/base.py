"""The contract of the control plane: one hub, many spokes, one ordered stream of what happens at the hub."""

from __future__ import annotations

from typing import Protocol

import msgspec

from splitlm.core import messages


class PeerCame(msgspec.Struct, frozen=True):
    """A spoke joined.

    Attributes:
        name: what it calls itself.
        host: its address as seen from the hub.
    """

    name: str
    host: str


class PeerGone(msgspec.Struct, frozen=True):
    """A spoke left, was lost, or sent what it must not.

    Attributes:
        name: what it called itself.
        reason: one sentence.
        silent_s: seconds since it was last heard.
    """

    name: str
    reason: str
    silent_s: float


Event = messages.Any | PeerCame | PeerGone
"""What a hub receives of one spoke: ``PeerCame`` first, then messages, ``PeerGone`` last."""


class Hub(Protocol):
    """The centre of the star. Peers are called by ids that the hub gives them on arrival; an id is never used again."""

    async def receive(self) -> tuple[str, Event]:
        """The next event, with the id of the peer; events of all peers come in one order.

        Raises:
            NetworkError: the hub was closed.
        """
        ...

    async def send(self, peer: str, message: messages.Message) -> None:
        """Say something to one peer.

        Raises:
            PeerLostError: it is gone.
        """
        ...

    def address(self, peer: str) -> str:
        """The peer's host as seen from the hub; still known after it left.

        Raises:
            PeerLostError: there never was such a peer.
        """
        ...

    async def drop(self, peer: str) -> None:
        """Part from a peer; nothing more is received of it. Safe for one that is gone."""
        ...

    async def close(self) -> None:
        """Part from all peers, after what was sent; safe to call twice."""
        ...


class Spoke(Protocol):
    """A node's way to the hub."""

    @property
    def hub_host(self) -> str:
        """The hub's host as seen from here."""
        ...

    async def send(self, message: messages.Message) -> None:
        """Say something to the hub.

        Raises:
            PeerLostError: the hub is gone.
        """
        ...

    async def receive(self) -> messages.Any:
        """The hub's next message.

        Raises:
            PeerLostError: the hub is gone, or was silent for too long; the seconds are named.
            ProtocolError: the hub sent what is not a message.
        """
        ...

    async def close(self) -> None:
        """Leave; safe to call twice."""
        ...
