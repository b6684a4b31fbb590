"""The aggregator where a worker averages: it is told by messages what one beside the coordinator is told by calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from splitlm.coordinator.closing import of_a_window
from splitlm.coordinator.members import Lost, Member, Who
from splitlm.core import training
from splitlm.core.errors import ProtocolError

if TYPE_CHECKING:
    from splitlm.coordinator.training import Training


class Remote:
    """An ``Aggregator`` (``orders``) in a worker's process, of the run that ``serve`` names.

    Args:
        keep: makes a round whole, of which everyone has the average and the model is written.

    Attributes:
        busy: never: the worker says itself that it is at work.
        jobs: none, likewise.
        found: what the model of the last round is worth, where the worker has rows to tell.
    """

    busy = False
    jobs = 0

    def __init__(self, keep: Callable[[int, dict[Who, training.Saved]], Awaitable[None]]) -> None:
        self._keep = keep
        self._run: Training | None = None
        self._seq, self._round = 0, -1
        self._members: list[Who] = []
        self.found: dict[str, float] = {}

    def serve(self, run: Training) -> None:
        """This is the run whose worker averages."""
        self._run = run

    async def expect(self, members: list[Who]) -> None:
        """See ``Aggregator``."""
        await self._say(-1, members)

    async def begin(self, round_: int, members: list[Who]) -> None:
        """See ``Aggregator``."""
        await self._say(round_, members)

    async def without(self, who: Who) -> None:
        """See ``Aggregator``. Where it is the worker itself, the run ends, and nobody is told."""
        if self._members:
            await self._say(self._round, [member for member in self._members if member != who])

    async def complete(self, round_: int, saved: dict[Who, training.Saved]) -> set[Who]:
        """See ``Aggregator``."""
        run, at = self._at()
        await run.tell(at, training.Keep(round_))
        while True:
            try:
                member, said = await run.hear(run.orders.timeout_s, f"{at} to write the model of round {round_}")
            except Lost as lost:
                await run.without(lost)
                continue
            match said:
                case training.Kept(round=number) if member is at and number == round_:
                    self.found = said.found
                    await self._keep(round_, saved)
                    return set(said.counted)
                case other if not of_a_window(other):
                    raise ProtocolError(f"{member} sent {type(other).__name__}", expected="Kept")

    async def _say(self, round_: int, members: list[Who]) -> None:
        run, at = self._at()
        self._seq, self._round, self._members = self._seq + 1, round_, list(members)
        if at.who in members:
            await run.tell(at, training.Average(self._seq, round_, self._members))

    def _at(self) -> tuple[Training, Member]:
        if self._run is None or self._run.averages is None:
            raise RuntimeError("no worker averages in this run")
        return self._run, self._run.averages
