"""What a spoke has heard and its user has not received yet."""

from __future__ import annotations

import asyncio

from splitlm.core import messages
from splitlm.core.errors import NetworkError


class Inbox:
    """Messages of the hub in their order, then the error that ended them, which is raised ever after.

    Args:
        most: how many may wait before ``put`` does; 0 for any number.
    """

    def __init__(self, most: int = 0) -> None:
        self._waiting: asyncio.Queue[messages.Any | NetworkError] = asyncio.Queue(most)
        self._error: NetworkError | None = None

    async def put(self, came: messages.Any | NetworkError) -> None:
        """Add what came, once there is room."""
        await self._waiting.put(came)

    def put_now(self, came: messages.Any | NetworkError) -> None:
        """Add what came to an inbox that takes any number."""
        self._waiting.put_nowait(came)

    async def receive(self) -> messages.Any:
        """The next message.

        Raises:
            NetworkError: nothing more comes, for this reason.
        """
        if self._error is None:
            came = await self._waiting.get()
            if not isinstance(came, NetworkError):
                return came
            self._error = came
        raise self._error

    def shut(self, error: NetworkError) -> None:
        """Forget what waits, and let who waits learn this error, or the one that was told already."""
        if self._error is None:
            self._error = error
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(self._error)
