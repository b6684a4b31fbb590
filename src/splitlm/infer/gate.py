"""Where laps begin: open, held (no lap begins), or shut (nothing at all leaves the head) behind a fence."""

from __future__ import annotations

import asyncio

from splitlm.wire.frame import Fence, Frame


class Gate:
    """The head's way out.

    While a barrier runs, every stage must know the same sessions: after the fence not even a session's Open or Close
    may leave, since it could be on some stages already and not yet on others.

    Attributes:
        held: no lap begins; what is under way goes on.
        shut: the fence has left, and nothing follows it.
    """

    def __init__(self) -> None:
        self.held = self.shut = False
        self._number = 0
        self._passed: asyncio.Future[None] | None = None

    def hold(self) -> None:
        """Let no lap begin."""
        self.held = True

    def fence(self) -> Frame:
        """The frame to send behind everything that was sent, and all that waits behind an earlier fence."""
        self.shut = False
        self._number += 1
        self._passed = asyncio.get_running_loop().create_future()
        return Frame(Fence(number=self._number))

    def leaving(self, frame: Frame) -> None:
        """This frame is about to leave."""
        if isinstance(frame.header, Fence):
            self.shut = True

    def home(self, fence: Fence) -> None:
        """A fence came home."""
        if fence.number == self._number and self._passed is not None and not self._passed.done():
            self._passed.set_result(None)

    async def passed(self) -> None:
        """Wait until the newest fence is home: every stage has done all that left before it."""
        if self._passed is not None:
            await self._passed

    def open(self) -> None:
        """Go on."""
        self.held = self.shut = False
