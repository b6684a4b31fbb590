"""A party's link to the aggregator: a state goes out, its average or sum comes back."""

from __future__ import annotations

import asyncio

import torch

from splitlm.core.errors import NetworkError
from splitlm.finetune.transfer import State, receive_state, send_state
from splitlm.wire.channel import Channel


class States:
    """Owns neither the channel nor what travels; to be made in a running event loop.

    Args:
        channel: to the aggregator.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._came: asyncio.Queue[State | NetworkError] = asyncio.Queue()
        self.lost: NetworkError | None = None
        """Why nothing can come any more."""
        self._sending: asyncio.Task[None] | None = None
        # Tasks of their own: who waits for a state may be cancelled, and half a state must not stay in the link.
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Stop reading and sending."""
        tasks = [self._reader] if self._sending is None else [self._reader, self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def exchange(self, state: State) -> dict[str, torch.Tensor]:
        """Send a state, and wait for what comes of it; what comes of older ones is dropped.

        Raises:
            NetworkError: the aggregator is gone.
            ProtocolError: what came cannot be read.
        """
        if self._sending is not None:
            await asyncio.wait({self._sending})
        self._sending = asyncio.create_task(send_state(self._channel, state))
        self._sending.add_done_callback(_heard)
        await asyncio.shield(self._sending)
        wanted = "model" if state.what == "update" else state.what
        while self.lost is None:
            came = await self._came.get()
            if isinstance(came, NetworkError):
                self.lost = came
            elif (came.what, came.round, came.window) == (wanted, state.round, state.window):
                return came.tensors
        raise self.lost

    async def _read(self) -> None:
        try:
            while True:
                await self._came.put(await receive_state(self._channel))
        except NetworkError as error:
            await self._came.put(error)


def _heard(sent: asyncio.Task[None]) -> None:
    """Nobody waits for a state of an aborted window: that its link ended, the reader learns too."""
    if not sent.cancelled():
        sent.exception()
