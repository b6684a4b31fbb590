"""Which session takes the next step on the head: first come, first served, so that nobody starves.

A session is ready when its next input is known: a prompt's next chunk, or the token that came home. Long prompts give
way after every chunk. While the way out is backed up, only decode steps (one row) go; chunks wait. Where sessions may
share a step, decode steps that are ready ride with the one whose turn it is.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A session's next step. ``prefill`` steps carry many rows."""

    session: int
    prefill: bool


class Schedule:
    """The queue of sessions that could compute now."""

    def __init__(self) -> None:
        self._ready: deque[Turn] = deque()

    def __len__(self) -> int:
        return len(self._ready)

    def ready(self, session: int, *, prefill: bool) -> None:
        """A session's next input is known."""
        self._ready.append(Turn(session, prefill))

    def forget(self, session: int) -> None:
        """A session ended; it takes no more turns."""
        self._ready = deque(turn for turn in self._ready if turn.session != session)

    def next(self, *, backed_up: bool) -> Turn | None:
        """The turn to take, removed from the queue; None when nobody may go."""
        for turn in self._ready:
            if not (turn.prefill and backed_up):
                self._ready.remove(turn)
                return turn
        return None

    def riders(self, most: int) -> list[Turn]:
        """Further decode turns, at most so many, removed from the queue: for a step whose turn has come anyway."""
        taken: list[Turn] = []
        kept: deque[Turn] = deque()
        for turn in self._ready:
            (kept if turn.prefill or len(taken) >= most else taken).append(turn)
        self._ready = kept
        return taken


def share(decoding: int, segments: int, width: int) -> int:
    """How many sessions the head puts into one decode step, at most: an equal part for each segment of the ring.

    All in one step would move round the ring in one clump, and only one stage would work at a time.

    Args:
        decoding: sessions beyond their prompt, whether ready or under way.
        segments: of the cut.
        width: what the engine allows, see ``Engine.width``.
    """
    return max(1, min(width, -(-decoding // segments)))


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """How a prompt of ``length`` tokens is cut for prefill: ``[begin, end)`` pairs, a function of the prompt alone."""
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]
