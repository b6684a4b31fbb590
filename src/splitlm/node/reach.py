"""With whom a party works, and whether links still reach them: a link that ended stays ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from splitlm.core.errors import NetworkError
from splitlm.finetune.plane import LinkLostError, Neighbour, Plane


class Reach:
    """Who takes part in what is being computed, and who of them was lost.

    Args:
        plane: the links.
        serves: whether a lost neighbour is none of the others' affair: its links are closed, and work goes on.
    """

    def __init__(self, plane: Plane, *, serves: bool) -> None:
        self._plane, self._serves = plane, serves
        self._lost: dict[Neighbour, str] = {}
        self._with: set[Neighbour] = set()
        self._scope: asyncio.Timeout | None = None

    def lost(self, who: Neighbour, error: NetworkError) -> None:
        """A link ended: what is being computed with this neighbour cannot be finished."""
        self._lost.setdefault(who, str(error))
        if self._serves:
            self._plane.leave(who)
        elif who in self._with and self._scope is not None:
            scope, self._scope = self._scope, None
            scope.reschedule(0)

    def missing(self) -> LinkLostError | None:
        """One who takes part, and whom no link reaches any more."""
        who = next((who for who in self._lost if who in self._with), None)
        return LinkLostError(who, self._lost[who]) if who is not None else None

    def expect(self, neighbours: set[Neighbour]) -> None:
        """These take part from now on."""
        self._with = neighbours

    async def only(self, neighbours: set[Neighbour]) -> None:
        """These take part from now on; the links of all others are closed."""
        self.expect(neighbours)
        for who in self._plane.neighbours - neighbours:
            await self._plane.part(who)

    async def forget(self) -> None:
        """Close what is left of links that ended."""
        for who in list(self._lost):
            await self._plane.part(who)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Work that is broken off when a link to one who takes part in it ends.

        Raises:
            LinkLostError: it was, or a link had ended before.
        """
        try:
            async with asyncio.timeout(None) as scope:
                if (error := self.missing()) is not None:
                    raise error
                self._scope = scope
                try:
                    yield
                finally:
                    self._scope = None
        except TimeoutError:
            if (error := self.missing()) is None:
                raise
            raise error from None
