"""Whether the moves that were asked for happened, and moved exactly what they must."""

from __future__ import annotations

from dataclasses import dataclass

from splitlm.core.shifts import Shift
from splitlm.node.window import Boundary
from splitlm.telemetry.record import Migration


@dataclass(frozen=True)
class Moves:
    """What came of the moves of one ring.

    Attributes:
        asked: in order.
        boundaries: all of the ring's.
        sides: of all nodes.
    """

    asked: tuple[Shift, ...]
    boundaries: tuple[Boundary, ...]
    sides: tuple[Migration, ...]

    @property
    def done(self) -> list[Boundary]:
        """Boundaries at which blocks moved."""
        return [boundary for boundary in self.boundaries if boundary.moves]

    def installed(self, boundary: Boundary) -> int:
        """Bytes of KV that the receivers of a move counted."""
        epoch = boundary.outcome.epoch
        return sum(side.kv_bytes for side in self.sides if side.epoch == epoch and side.role == "receiver")

    @property
    def failure(self) -> str:
        """What is wrong; empty if nothing is."""
        if len(self.done) < len(self.asked):
            refused = next((b.outcome.reason for b in self.boundaries if b.outcome.aborted), "the texts ended before")
            return f"{len(self.asked) - len(self.done)} of {len(self.asked)} moves did not happen: {refused}"
        for boundary in self.done:
            if (came := self.installed(boundary)) != boundary.kv_bytes:
                return f"at token {boundary.laps} {came} bytes of KV came, and {boundary.kv_bytes} were due"
        return ""
