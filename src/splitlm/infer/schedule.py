"""Which session takes the next step on the head: first come, first served, so that nobody starves.

A session is ready when its next input is known: a prompt's next chunk, or the token that came home. Long prompts give
way after every chunk. While the way out is backed up, only decode steps (one row) go; chunks wait.
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


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """How a prompt of ``length`` tokens is cut for prefill: ``[begin, end)`` pairs, a function of the prompt alone."""
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]
