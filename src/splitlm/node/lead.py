"""The head's part in windows: it leads the barriers, and follows them with its own stage like any other node."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, cast

from splitlm.coordinator.coordinator import Coordinator
from splitlm.core import messages
from splitlm.core.cut import Cut, Move
from splitlm.infer.head import Head
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.migrate.mover import Mover
from splitlm.model.load import ModelFiles
from splitlm.node.auto import AutoPlan, assumed
from splitlm.node.follower import Follower
from splitlm.node.settings import RingSettings
from splitlm.node.window import Plan, Windows, forced
from splitlm.node.work import StageWork

Send = Callable[[int, messages.Message], Awaitable[None]]


def plan_of(settings: RingSettings, files: ModelFiles, cut: Cut, head: Head) -> Plan:
    """Who decides what boundaries bring: the user's moves, the measured times, or nobody."""
    if settings.plan == "auto":
        return AutoPlan(assumed(settings, files, cut), settings.horizon, lambda: len(head.sessions))
    return forced(settings.shifts, settings.window, settings.background)


class Lead:
    """Windows of one ring, on its head. To be made in a running event loop.

    Args:
        send: brings a message to another node.
        relays: the head's own; the first one's stage takes part in moves.
        changed: told the cut that serves from now on.
        ctrl_timeout_s: how long a barrier waits.
    """

    def __init__(
        self,
        head: Head,
        mover: Mover,
        relays: Sequence[Relay],
        meter: Meter,
        send: Send,
        plan: Plan,
        *,
        window: int,
        ctrl_timeout_s: float,
        changed: Callable[[Cut], None],
    ) -> None:
        cut = mover.cut
        self._plan = plan
        self._mover, self._stage, self._others = mover, relays[0].stage, send
        self.work = StageWork(0, mover, relays, meter, changed)
        self._follower = Follower(
            self._hear_own, self.work, epoch=cut.epoch, ctrl_timeout_s=ctrl_timeout_s, measure=meter.window_ms
        )
        self._coordinator = Coordinator(self._send, range(cut.stages), cut=cut, ctrl_timeout_s=ctrl_timeout_s)
        self.windows = Windows(
            head, self._coordinator, plan, window, meter.sink, kv_due=self._kv_due, patience_s=ctrl_timeout_s
        )

    @property
    def parts(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run, each until cancelled."""
        return [self._mover.run(), self._follower.run(), self.windows.run()]

    def heard(self, node: int, message: messages.Any) -> None:
        """A stage said its part in a barrier."""
        if isinstance(message, messages.Prepared) and isinstance(self._plan, AutoPlan):
            self._plan.measured(node, message.compute_ms)
        self._coordinator.hear(node, message)

    def lost(self, node: int, reason: str) -> str:
        """A stage is gone: no barrier is possible any more. Returns what was going on, in words."""
        standing = self._coordinator.standing
        self._coordinator.lost(node, reason)
        return standing

    async def _send(self, node: int, message: messages.Message) -> None:
        if node == 0:
            self._follower.hear(cast(messages.Any, message))
        else:
            await self._others(node, message)

    async def _hear_own(self, message: messages.Message) -> None:
        self.heard(0, cast(messages.Any, message))

    def _kv_due(self, moves: Sequence[Move]) -> int:
        """Bytes of keys and values that move with these blocks; every stage has seen the same tokens as this one."""
        seen = [self._stage.seen(session) for session in self._stage.sessions]
        return self._mover.kv_bytes([move.block for move in moves], seen)
