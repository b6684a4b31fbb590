"""What the hub and a spoke both keep of their way to each other through a broker."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from splitlm.bus.letter import Count, Letter
from splitlm.core.errors import NetworkError, PeerLostError

FLUSH_S = 3.0
"""How long the last words may take to reach the broker."""


@dataclass
class Half:
    """One direction out and one in, between the hub and one spoke."""

    peer: str
    queue: str
    said_at: float
    heard_at: float
    said: int = 0
    heard: Count = field(default_factory=Count)

    def next(self, kind: str, now: float) -> Letter:
        """The next numbered letter; called in the order in which they are posted."""
        self.said += 1
        self.said_at = now
        return Letter(kind="bye" if kind == "bye" else "say", peer=self.peer, number=self.said)

    def silent_s(self, now: float, up_since: float) -> float:
        """Seconds since it was last heard, while it could be heard."""
        return now - max(self.heard_at, up_since)


def silence(name: str, timeout_s: float, heartbeat_s: float) -> PeerLostError:
    """The error for a peer that gave no sign of life."""
    return PeerLostError(
        f"The peer was silent for {timeout_s:g} s",
        where=name,
        expected=f"a sign of life every {heartbeat_s:g} s",
        remedy="Check that its process runs and reaches the broker",
    )


async def flushed(sent: asyncio.Future[bool]) -> None:
    """Wait a little until the broker has it; whether it did is not the concern of who leaves."""
    with contextlib.suppress(TimeoutError, NetworkError):
        async with asyncio.timeout(FLUSH_S):
            await asyncio.shield(sent)
