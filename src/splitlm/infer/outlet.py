"""The head's way out: frames leave from the compute thread where nothing waits before them, else by the event loop.

The frames of one step leave together, and in its order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from splitlm.core.errors import ProtocolError
from splitlm.infer.relay import Step
from splitlm.infer.session import Lap
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Buffer, Failed, Header, Token

BACKLOG_STEPS = 2


@dataclass(frozen=True)
class Sent:
    """Steps of one forward of the first segment.

    Attributes:
        sizes: bytes that each sent, of the first of them: of those that wait for nothing any more.
        when_ns: when the last of these was sent, or was done with nothing to send.
    """

    steps: Sequence[Step]
    sizes: Sequence[int]
    when_ns: int


class Outlet:
    """Sends to the next node.

    Args:
        channel: None where there is none: the first segment is the whole model.
        sent: called with laps of one step when all its frames are with the kernel, and when that was (ns).
        room: called when fewer steps wait than ``BACKLOG_STEPS``.
    """

    def __init__(
        self, channel: Channel | None, sent: Callable[[Sequence[Lap], int], None], room: Callable[[], None]
    ) -> None:
        self._channel, self._told, self._room = channel, sent, room
        self._waiting: asyncio.Queue[tuple[Sequence[Step], Sequence[Lap]]] = asyncio.Queue()
        self._sending = False

    @property
    def free(self) -> bool:
        """Whether nothing waits."""
        return self._waiting.empty() and not self._sending

    @property
    def backed_up(self) -> bool:
        """Whether so much waits that long prompts should."""
        return self._waiting.qsize() >= BACKLOG_STEPS

    def leave(self, steps: Sequence[Step], free: bool) -> Sent:
        """Send what can be sent at once. On the compute thread.

        Args:
            free: as it was when the thread was given the work.
        """
        frames = [(_onward(step), step.tensors) for step in steps]
        if free and self._channel is not None:
            sizes = at_once(self._channel, frames)
        else:
            sizes = [0 for _ in takewhile(lambda frame: frame[0] is None, frames)]
        return Sent(steps, sizes, time.monotonic_ns() if any(sizes) else steps[0].end_ns)

    def follow(self, done: Sent, laps: Sequence[Lap]) -> None:
        """Let what ``leave`` could not send leave as soon as possible. On the event loop.

        Args:
            laps: of these steps; none where they only open or close a session.

        Raises:
            ProtocolError: there is no next node.
        """
        for lap, step in zip(laps, done.steps, strict=False):
            lap.step = step
        for lap, size in zip(laps, done.sizes, strict=False):
            lap.bytes_out = size
        left = done.steps[len(done.sizes) :]
        if not left:
            self._told(laps, done.when_ns)
        elif self._channel is None:
            raise ProtocolError("A frame has no next node to go to", expected="a ring of more than one segment")
        else:
            self._waiting.put_nowait((left, laps))

    async def run(self) -> None:
        """Send what waits, until cancelled."""
        while True:
            steps, laps = await self._waiting.get()
            self._sending = True
            for step in steps:
                if (header := _onward(step)) is not None:
                    await self._send(header, step.tensors, [lap for lap in laps if lap.step is step])
            self._told(laps, time.monotonic_ns())
            self._sending = not self._waiting.empty()
            if not self.backed_up:
                self._room()

    async def _send(self, header: Header, tensors: Sequence[Buffer], laps: Sequence[Lap]) -> None:
        channel = self._channel
        if channel is None:
            return
        before = channel.bytes_out
        await channel.send(header, tensors)
        for lap in laps:
            lap.bytes_out = channel.bytes_out - before


def at_once(channel: Channel, frames: Sequence[tuple[Header | None, Sequence[Buffer]]]) -> list[int]:
    """Send frames from any thread, as far as they can leave now and in this order.

    Returns:
        Bytes of each, of the first of them: those that follow have to wait. 0 where there is nothing to send.
    """
    given = [(header, tensors) for header, tensors in frames if header is not None] if len(frames) > 1 else []
    if len(given) > 1 and (sent := channel.send_together(given)):
        each = iter(sent)
        return [0 if header is None else next(each) for header, _ in frames]
    sizes = []
    for header, tensors in frames:
        before = channel.bytes_out
        if header is not None and not channel.send_now(header, tensors):
            break
        sizes.append(channel.bytes_out - before)
    return sizes


def _onward(step: Step) -> Header | None:
    """What the next node is to have of a step: tokens and failures are for the head."""
    return None if isinstance(step.header, Token | Failed) else step.header
