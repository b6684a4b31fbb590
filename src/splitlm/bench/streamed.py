"""Figures that one stream through a ring has whatever engine runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitlm.bench.comparison import STAGES
from splitlm.bench.figure import Figure, Goal, figure, ratios


def streamed(
    samples: Mapping[str, Sequence[float]], cuts: Sequence[int], seen: Mapping[str, Any], how: str, goal: Goal
) -> list[Figure]:
    """The ring against the uncut loop, and what bare sockets leave of it.

    Args:
        samples: tokens/s of ``ring``, ``uncut`` and ``bare``, by turn.
        cuts: of the ring.
        seen: what its trace gave.
        how: both sides computed.
    """
    compute = ", ".join(f"{ms:.2f} ms" for ms in seen["compute"].values())
    return [
        figure(
            "stream",
            f"one stream, ring of {STAGES} ÷ our uncut loop, tokens/s, {how}",
            ratios(samples, "ring", "uncut"),
            goal=goal,
            note=f"cuts {','.join(map(str, cuts))}, median compute per stage {compute}",
        ),
        figure(
            "stream-ceiling",
            "the same stages over blocking sockets, no loop, no trace ÷ our uncut loop",
            ratios(samples, "bare", "uncut"),
        ),
    ]


def hop(seen: Mapping[str, Any], goal: Goal | None = None, note: str = "") -> Figure:
    """A hop's median and its 90th percentile, from the trace."""
    p50, p90, count = seen["hops"]
    return Figure(
        name="hop",
        text="hop beyond compute, loopback, p50 (high: p90)",
        value=p50,
        low=p50,
        high=p90,
        count=count,
        unit="ms",
        goal=goal,
        note=note,
    )
