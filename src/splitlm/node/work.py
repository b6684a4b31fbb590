"""What a node does for a barrier: its mover, its relays, and the records of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from splitlm.core.cut import Cut
from splitlm.core.messages import Prepare, Side
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.migrate.costs import Costs
from splitlm.migrate.mover import Mover
from splitlm.telemetry.record import Migration

KEPT = 100
"""Moves that a stage remembers."""
REPORT_BYTES = 6000
"""What they may take of its last message."""


class StageWork:
    """A stage's ``Work`` for its ``Follower``.

    Attributes:
        done: the newest ``KEPT`` moves of which everything is known.

    Args:
        changed: called with the cut that serves from now on.
    """

    def __init__(
        self, node: int, mover: Mover, relays: Sequence[Relay], meter: Meter, changed: Callable[[Cut], None]
    ) -> None:
        self._node, self._mover, self._relays, self.meter, self._changed = node, mover, relays, meter, changed
        self._proposed = False
        self._costs: list[Costs] = []
        self._records: list[Migration] = []
        self._stood_ns = self._first_ns = 0
        self.done: deque[Migration] = deque(maxlen=KEPT)

    async def announced(self, cut: Cut) -> None:
        """See ``follower.Work``."""
        await self._mover.bring(cut)

    async def prepare(self, prepare: Prepare) -> None:
        """See ``follower.Work``."""
        self._proposed = prepare.cut is not None
        if prepare.cut is not None:
            await self._mover.prepare(prepare.cut, prepare.seq)

    async def commit(self, cut: Cut | None) -> None:
        """See ``follower.Work``."""
        self._proposed = False
        if cut is None:
            return
        self.flush()  # two changes without a step between them
        self._costs = await self._mover.commit()
        self._stood_ns, self._first_ns = self.meter.last_end_ns, 0
        self.meter.after(self._stood_ns, self._note_first)
        for relay in self._relays:
            relay.epoch = cut.epoch
        self.meter.epoch = cut.epoch
        self._changed(cut)

    async def abort(self) -> None:
        """See ``follower.Work``."""
        proposed, self._proposed = self._proposed, False
        if proposed:
            await self._mover.abort()

    async def finish(self) -> None:
        """See ``follower.Work``."""
        released = await self._mover.release()
        self._records = [self._record(costs, released) for costs in self._costs]
        self._costs = []
        if self._first_ns:
            self._write(self._first_ns)

    def flush(self) -> None:
        """Write what still waits for a first step, which does not come any more: no pause is known."""
        self._records += [self._record(costs, 0.0) for costs in self._costs]
        self._costs = []
        self._write(0)

    def told(self) -> list[Side]:
        """The newest moves, as many as fit the message that reports them."""
        sides: list[Side] = []
        room = REPORT_BYTES
        for record in reversed(self.done):
            side = Side(**{name: getattr(record, name) for name in Side.__struct_fields__})
            room -= len(msgspec.json.encode(side))
            if room < 0:
                break
            sides.insert(0, side)
        return sides

    def _note_first(self, first_ns: int) -> None:
        self._first_ns = first_ns
        self._write(first_ns)

    def _write(self, first_ns: int) -> None:
        """Write the records of the last change, if there are any by now; ``first_ns`` is when its first step began."""
        records, self._records = self._records, []
        pause = (first_ns - self._stood_ns) / 1e6 if self._stood_ns and first_ns else None
        for record in records:
            told = msgspec.structs.replace(record, pause_ms=pause)
            self.meter.sink.write(told)
            self.done.append(told)

    def _record(self, costs: Costs, released_ms: float) -> Migration:
        receiver = costs.role == "receiver"
        return Migration(
            node=self._node,
            peer=costs.peer,
            role=costs.role,
            epoch=costs.epoch,
            blocks=costs.blocks,
            kv_bytes=costs.kv_bytes,
            kv_tokens=costs.kv_tokens,
            kv_ms=costs.kv_ms,
            background_bytes=costs.background_bytes,
            pack_ms=None if receiver else costs.pack_ms,
            commit_ms=costs.commit_ms,
            weight_construct_ms=costs.construct_ms if receiver else None,
            weight_read_ms=costs.read_ms if receiver else None,
            weight_pack_ms=costs.weight_pack_ms if receiver else None,
            page_cache_warm=costs.cached if receiver else None,
            release_ms=None if receiver else released_ms,
        )
