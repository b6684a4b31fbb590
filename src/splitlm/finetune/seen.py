"""Which frames came before: what a link repeats is dropped, and what is left of older rounds."""

from __future__ import annotations

from splitlm.wire.frame import Backward, Forward, Scored


class Seen:
    """The frames that came since the last ``forget``, or since a round began."""

    def __init__(self) -> None:
        self._marks: set[tuple[str | int, ...]] = set()
        self._newest = -1

    def is_new(self, header: Forward | Backward | Scored) -> bool:
        """Whether this frame comes for the first time, and in no round that is over; from now on it came before."""
        if header.round != self._newest:
            if header.round < self._newest:
                return False
            self._newest = header.round
            self._marks.clear()
        part = header.part if not isinstance(header, Scored) else 0
        mark = (type(header).__name__, header.window, header.owner, header.index, part)
        new = mark not in self._marks
        self._marks.add(mark)
        return new

    def forget(self) -> None:
        """The window is over, or begins."""
        self._marks.clear()
