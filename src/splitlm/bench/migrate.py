"""The figures of moves: what one costs the tokens that flow meanwhile, beside one that is made while they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median

from splitlm.bench import laps
from splitlm.bench.arm import Arm
from splitlm.bench.auto import AUTO
from splitlm.bench.comparison import STAGES, Comparison, Comparisons, Plan
from splitlm.bench.figure import Figure, Goal, figure
from splitlm.bench.windows import WINDOW
from splitlm.bench.windows import WINDOWS as NOOPS
from splitlm.core.errors import SplitlmError
from splitlm.telemetry.record import Migration, Record

PROMPT, AT, WINDOWS = 54, 3, 4
"""Tokens of a prompt, the boundary of a generation at which a block moves, and its boundaries in all."""
HELD = PROMPT + AT * WINDOW - 1
"""Tokens that the ring holds by then: 113."""
TOKENS = WINDOWS * WINDOW + 2
PAIR = (1, -1)
"""The head pulls a block in one generation, and gives it back in the next: every turn begins with the same cut."""


def shifts(turns: int) -> list[tuple[int, int, int]]:
    """The moves of so many turns, as token of the ring's life, boundary and blocks."""
    return [((i * WINDOWS + AT) * WINDOW, 1, PAIR[i % len(PAIR)]) for i in range(turns * len(PAIR))]


def shift(plan: Plan) -> list[Figure]:
    """One block there and back: brought in the background, and brought while the ring stands."""
    folders = {"background": plan.work / "shift", "stop": plan.work / "stop-and-copy"}
    asked = shifts(plan.repetitions + 1)  # a turn comes before those that count
    with plan.arms() as arms:
        rings = {
            name: arms.ring(
                stages=STAGES, window=WINDOW, shifts=asked, trace=str(folder), background=name == "background"
            )
            for name, folder in folders.items()
        }
        arms.turns({name: _turn(ring) for name, ring in rings.items()})
        for ring in rings.values():
            ring.run("finish")
    read = {name: laps.read(folder) for name, folder in folders.items()}
    found = {name: counted(laps.moves(read[name], WINDOW), folder) for name, folder in folders.items()}
    return [
        *_gaps(found["background"], found["stop"]),
        _stands(read["background"], "shift-barrier", "the part of it that is the barrier's, drain and laps left out"),
        _stands(read["stop"], "stop-and-copy-barrier", "the same, when all is brought while the ring stands"),
        *_costs(found["background"]),
    ]


def _turn(ring: Arm) -> Callable[[], float]:
    def take() -> float:
        return sum(float(ring.run(tokens=TOKENS, prompt_tokens=PROMPT)["seconds"]) for _ in PAIR)

    return take


def counted(moves: Sequence[laps.Move], folder: Path) -> list[laps.Move]:
    """The moves after the first turn.

    Raises:
        SplitlmError: none is left; every one was put off or aborted.
    """
    rest = list(moves[len(PAIR) :])
    if not {True, False} <= {move.pulled for move in rest}:
        raise SplitlmError(
            "Blocks did not move in both directions", where=str(folder), expected="a move per generation"
        )
    return rest


def _gaps(moved: Sequence[laps.Move], stopped: Sequence[laps.Move]) -> list[Figure]:
    lap = median(move.ordinary_ms for move in moved)
    pulled, pushed = ([m.extra_ms for m in moved if m.pulled is side] for side in (True, False))
    text = f"extra gap of a one-block shift at {HELD} tokens over a noop barrier, one session"
    goal = Goal("<=", 10.0, 2.0)
    extra, copied = ([m.extra_ms for m in side] for side in (moved, stopped))
    return [
        figure("shift-pull", f"{text}, the head takes the block", pulled, unit="ms", goal=goal),
        figure("shift-push", f"{text}, the head gives it", pushed, unit="ms", goal=goal),
        figure(
            "shift-laps",
            "the same in laps, both directions",
            [m.extra_ms / m.ordinary_ms for m in moved],
            goal=Goal("<=", 1.0),
            note=f"a lap takes {lap:.2f} ms; the whole gap over a lap is {median(m.gap_ms for m in moved):.2f} ms",
        ),
        figure(
            "stop-and-copy",
            "extra gap when weights and KV are brought while the ring stands, both directions",
            copied,
            unit="ms",
            note=f"{median(copied) - median(extra):.2f} ms more than a shift that was staged in the background",
        ),
        figure(
            "staging",
            "laps while the block is staged in the background ÷ the same laps without",
            [m.staging for m in moved],
            note=f"{median(m.lost_ms for m in moved):.2f} ms lost per move",
        ),
    ]


def _stands(records: Sequence[Record], name: str, text: str) -> Figure:
    """How much longer barriers with a move take than the median of those without, on the head."""
    _, noops = laps.protocol(records)
    _, moved = laps.protocol(records, "forced-shift")
    note = f"a noop barrier takes {median(noops):.2f} ms here"
    return figure(name, text, [ms - median(noops) for ms in moved[len(PAIR) :]], unit="ms", note=note)


def _costs(moved: Sequence[laps.Move]) -> list[Figure]:
    """What the nodes recorded of the moves."""
    sides = [side for move in moved for side in move.sides]
    donors = [side for side in sides if side.role == "donor"]
    receivers = [side for side in sides if side.role == "receiver"]

    def told(who: Iterable[Migration], value: Callable[[Migration], float | None]) -> list[float]:
        return [found for side in who if (found := value(side)) is not None]

    wanted = [
        ("release", "donor: giving the block's memory back, after the barrier", donors, lambda s: s.release_ms, "ms"),
        ("weights-construct", "receiver: building the block without weights", receivers, _construct, "ms"),
        (
            "weights-read",
            "receiver: reading its tensors (pages in memory)",
            receivers,
            lambda s: s.weight_read_ms,
            "ms",
        ),
        (
            "kv-background",
            "keys and values sent while tokens flowed",
            donors,
            lambda s: s.background_bytes / 1024,
            "KiB",
        ),
        ("kv-barrier", "keys and values sent within the barrier", donors, _in_barrier, "KiB"),
        ("kv-wait", "sending or awaiting them there: an upper bound", sides, lambda s: s.kv_ms, "ms"),
        ("apply", "applying the change on a node", sides, lambda s: s.commit_ms, "ms"),
    ]
    return [
        figure(name, text, values, unit=unit) for name, text, who, value, unit in wanted if (values := told(who, value))
    ]


def _construct(side: Migration) -> float | None:
    return side.weight_construct_ms


def _in_barrier(side: Migration) -> float:
    return (side.kv_bytes - side.background_bytes) / 1024


COMPARISONS: Comparisons = {"windows": NOOPS, "shift": Comparison(shift, lambda _: PROMPT + TOKENS), "auto": AUTO}
