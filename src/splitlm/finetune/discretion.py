"""What an owner lets others know of its rows: sums over two samples at least, and no words that quote one."""

from __future__ import annotations

import logging

from splitlm.core.errors import SplitlmError, UsageError
from splitlm.core.shape import Role

_log = logging.getLogger("splitlm.train")
LEAST = 2
"""Samples of a sum that may leave: the sum of one is that sample's own loss."""


class Report:
    """A round's loss as it may leave. What is too small to be told is told together with what comes next.

    Nothing can be told apart by subtracting: the round's own sum is that of all that was told before it. A remainder
    that is still too small at a round's end stays untold.
    """

    def __init__(self) -> None:
        self.loss, self.items = 0.0, 0
        """Of all that was told."""
        self._loss, self._items, self._samples = 0.0, 0, 0

    def add(self, loss: float, items: int, samples: int) -> tuple[float, int]:
        """What may be told after a window with these sums: a loss, and its items; nothing (0.0, 0) if it must wait."""
        self._loss, self._items, self._samples = self._loss + loss, self._items + items, self._samples + samples
        if self._samples < LEAST:
            return 0.0, 0
        told = self._loss, self._items
        self.loss, self.items = self.loss + told[0], self.items + told[1]
        self._loss, self._items, self._samples = 0.0, 0, 0
        return told


def discreet(role: Role, error: SplitlmError) -> SplitlmError:
    """An error as it may be told to others.

    An owner's errors about what it was given may quote a row or a label, which stay where they are: its own log has
    them whole.
    """
    if role == "owner" and isinstance(error, UsageError):
        _log.error("%s", error)
        return UsageError("Its rows or settings cannot be used", remedy="Look at its own log")
    return error
