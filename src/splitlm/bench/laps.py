"""What a barrier, a move and the staging before it did to the laps of one session. Pure: records in, numbers out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from splitlm.telemetry.record import Migration, Record, Step, Window
from splitlm.telemetry.sinks import read_trace


@dataclass(frozen=True)
class Lap:
    """A lap on the head: milliseconds from one token home to the next, and the epoch of its cut."""

    ms: float
    epoch: int


@dataclass(frozen=True)
class Generation:
    """The laps of one session, sorted by what they contain. All milliseconds.

    Attributes:
        ordinary: median of the laps without a barrier.
        noops: laps with a barrier that moved nothing, and behind which nothing was staged.
        moves: by the epoch that came, the lap whose barrier brought it.
        staging: by epoch, the laps of the window before: the first one contains the barrier behind which the move was
            announced.
    """

    ordinary: float
    noops: tuple[float, ...]
    moves: dict[int, float]
    staging: dict[int, tuple[float, ...]]


@dataclass(frozen=True)
class Move:
    """What one move cost its session. Milliseconds.

    Attributes:
        pulled: the head received the blocks; False where it gave them.
        extra_ms: its token gap over that of a noop barrier.
        gap_ms: its token gap over an ordinary lap.
        ordinary_ms: a lap without a barrier.
        staging: laps while it was staged ÷ the same laps without.
        lost_ms: what they lost together.
        sides: records of the nodes that took part.
    """

    pulled: bool
    extra_ms: float
    gap_ms: float
    ordinary_ms: float
    staging: float
    lost_ms: float
    sides: tuple[Migration, ...]


def read(folder: Path) -> list[Record]:
    """Every record of every node's trace in this folder."""
    return [record for path in sorted(folder.glob("trace-node*.jsonl")) for record in read_trace(path)]


def generations(records: Iterable[Record], window: int) -> list[Generation]:
    """One for each session with two barriers at least, in the order of their numbers. Sessions must not overlap."""
    laps: dict[int, dict[int, Lap]] = defaultdict(dict)
    for record in records:
        if isinstance(record, Step) and record.node == 0 and record.tpot_ms is not None:
            laps[record.session][record.position] = Lap(record.tpot_ms, record.epoch)
    ordered = [[laps[session][position] for position in sorted(laps[session])] for session in sorted(laps)]
    return [generation(one, window) for one in ordered if len(one) >= 2 * window]


def generation(laps: Sequence[Lap], window: int) -> Generation:
    """Sort the laps of one session, the first of which took in its first token.

    The lap of token n·``window`` contains barrier n; where its epoch is a new one, that barrier moved blocks.
    """
    barriers = range(window - 1, len(laps), window)
    moved = [i for i in barriers if laps[i].epoch != laps[i - 1].epoch]
    before = [i - window for i in moved]
    return Generation(
        ordinary=median(lap.ms for i, lap in enumerate(laps) if i not in barriers),
        noops=tuple(laps[i].ms for i in barriers if i not in moved and i not in before),
        moves={laps[i].epoch: laps[i].ms for i in moved},
        staging={laps[i].epoch: tuple(lap.ms for lap in laps[max(0, i - window) : i]) for i in moved},
    )


def moves(records: Sequence[Record], window: int) -> list[Move]:
    """The moves, in order; none of a run without a noop barrier.

    What a barrier adds to an ordinary lap is a difference within its session, so the machine's speed at the time is
    out of it, and what noop barriers add may be pooled over sessions.
    """
    sides: dict[int, list[Migration]] = defaultdict(list)
    for record in records:
        if isinstance(record, Migration):
            sides[record.epoch].append(record)
    all_made = generations(records, window)
    gaps = [ms - made.ordinary for made in all_made for ms in made.noops]
    if not gaps:
        return []
    return [_move(made, epoch, sides[epoch], median(gaps)) for made in all_made for epoch in sorted(made.moves)]


def _move(made: Generation, epoch: int, sides: Sequence[Migration], noop_gap: float) -> Move:
    noop, ms = made.ordinary + noop_gap, made.moves[epoch]
    loading = max((staging_ms(side) for side in sides), default=0.0)
    # The announcement follows the barrier that the first lap contains; one lap more, for the way there and back.
    during = made.staging[epoch][: 1 + math.ceil(loading / made.ordinary)]
    plain = noop + (len(during) - 1) * made.ordinary
    return Move(
        pulled=any(side.node == 0 and side.role == "receiver" for side in sides),
        extra_ms=ms - noop,
        gap_ms=ms - made.ordinary,
        ordinary_ms=made.ordinary,
        staging=sum(during) / plain,
        lost_ms=sum(during) - plain,
        sides=tuple(sides),
    )


def staging_ms(side: Migration) -> float:
    """How long one side took to bring its part of a move: building blocks, or copying rows out of live caches."""
    parts = (side.weight_construct_ms, side.weight_read_ms, side.weight_pack_ms, side.pack_ms)
    return sum(part or 0.0 for part in parts)


def protocol(records: Iterable[Record], decision: str = "noop") -> tuple[list[float], list[float]]:
    """Milliseconds of every barrier of this kind, the protocol alone: on the stages; on the head, without its drain."""
    stages: list[float] = []
    head: list[float] = []
    for record in records:
        if isinstance(record, Window) and record.decision == decision and not record.aborted:
            if record.node:
                stages.append(record.barrier_ms)
            else:
                head.append(record.barrier_ms - (record.drain_ms or 0.0))
    return stages, head
