"""What is said of moves once a text is written: where they happened, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from splitlm.cli.plan import size

if TYPE_CHECKING:
    from splitlm.core.shifts import Shift
    from splitlm.node.window import Boundary
    from splitlm.telemetry.record import Migration


def told(boundaries: Sequence[Boundary], migrations: Sequence[Migration], asked: Sequence[Shift] = ()) -> list[str]:
    """One line for each move, each refusal, and for moves of those asked for that did not happen."""
    lines = []
    for boundary in boundaries:
        if boundary.moves:
            lines.append(_moved(boundary, boundaries, migrations))
        elif boundary.outcome.aborted:
            lines.append(f"the barrier at token {boundary.laps} was aborted: {boundary.outcome.reason}")
        elif boundary.late:
            lines.append(f"nothing moved at token {boundary.laps}: a stage had not loaded its blocks yet")
    missing = unmet(boundaries, asked)
    return [*lines, missing] if missing else lines


def unmet(boundaries: Sequence[Boundary], asked: Sequence[Shift]) -> str:
    """What is to be said where moves that were asked for did not happen; empty where all did."""
    done = sum(bool(boundary.moves) for boundary in boundaries)
    if done >= len(asked):
        return ""
    at, last = asked[done].at, next((b for b in reversed(boundaries) if not b.moves), None)
    if last is not None and last.outcome.aborted:
        why = last.outcome.reason
    elif last is not None and last.late:
        why = "a stage had not loaded its blocks yet when the last window ended"
    else:
        why = f"no window ended between token {at} and the end of the text"
    return f"{len(asked) - done} of {len(asked)} moves did not happen: {why}"


def _moved(boundary: Boundary, boundaries: Sequence[Boundary], migrations: Sequence[Migration]) -> str:
    blocks = [move.block for move in boundary.moves]
    several = f"blocks {blocks[0]}–{blocks[-1]}" if len(blocks) > 1 else f"block {blocks[0]}"
    first, epoch = boundary.moves[0], boundary.outcome.epoch
    words = f"{several} moved from stage {first.source} to stage {first.target} at token {boundary.laps}: "
    extra = boundary.extra_ms(boundaries)
    if extra is not None:
        words += f"the stream paused {extra:.1f} ms more than at an ordinary window boundary, "
    else:
        words += f"the stream paused {boundary.stood_ms:.1f} ms, "
    words += f"{size(boundary.kv_bytes)} of KV"
    donors = [side for side in migrations if side.epoch == epoch and side.role == "donor"]
    if donors:
        words += f", {size(sum(side.background_bytes for side in donors))} of it while tokens flowed"
    return words
