"""Moves of a boundary that a user asks for."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from splitlm.core.cut import Cut, shift


class Shift(msgspec.Struct, frozen=True):
    """A forced move of one boundary.

    Attributes:
        at: token at which it is asked for; it happens at the next window boundary.
        boundary: s, the one between stages s−1 and s.
        k: blocks; above 0 stage s−1 pulls them from stage s, below 0 it pushes them to it.
    """

    at: int
    boundary: int = 1
    k: int = 1


def check_shifts(cut: Cut, shifts: Sequence[Shift]) -> Cut:
    """The cut after these moves, one after the other.

    Raises:
        CutError: one empties a stage, moves a fixed boundary, or there is but one stage.
    """
    for asked in shifts:
        cut = shift(cut, asked.boundary, asked.k)
    return cut
