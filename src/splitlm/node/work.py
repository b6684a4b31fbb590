"""What a node does for a barrier: its mover, its relays, and the records of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from splitlm.core.cut import Cut
from splitlm.core.messages import Prepare
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.migrate.costs import Costs
from splitlm.migrate.mover import Mover
from splitlm.telemetry.record import Migration


class StageWork:
    """A stage's ``Work`` for its ``Follower``.

    Args:
        changed: called with the cut that serves from now on.
    """

    def __init__(
        self, node: int, mover: Mover, relays: Sequence[Relay], meter: Meter, changed: Callable[[Cut], None]
    ) -> None:
        self._node, self._mover, self._relays, self._meter, self._changed = node, mover, relays, meter, changed
        self._proposed = False
        self._costs: list[Costs] = []
        self._stood_ns = self._first_ns = 0

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
        if cut is None:
            return
        self._costs = await self._mover.commit()
        self._stood_ns, self._first_ns = self._meter.last_end_ns, 0
        self._meter.after(self._stood_ns, self._note_first)
        for relay in self._relays:
            relay.epoch = cut.epoch
        self._meter.epoch = cut.epoch
        self._changed(cut)

    async def abort(self) -> None:
        """See ``follower.Work``."""
        if self._proposed:
            self._mover.abort()

    async def finish(self) -> None:
        """See ``follower.Work``."""
        released = await self._mover.release()
        records = [self._record(costs, released) for costs in self._costs]
        stood, self._costs = self._stood_ns, []

        def write(first_ns: int) -> None:
            pause = (first_ns - stood) / 1e6 if stood else None
            for record in records:
                self._meter.sink.write(msgspec.structs.replace(record, pause_ms=pause))

        if records and self._first_ns:
            write(self._first_ns)
        elif records:
            self._meter.after(stood, write)

    def _note_first(self, first_ns: int) -> None:
        self._first_ns = first_ns

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
            commit_ms=costs.commit_ms,
            weight_construct_ms=costs.construct_ms if receiver else None,
            weight_read_ms=costs.read_ms if receiver else None,
            release_ms=None if receiver else released_ms,
        )
