"""The links of one party in training: two lanes to every neighbour, what arrives on them, and what waits to leave.

Activations and gradients have links of their own, so a full queue of the ones cannot hold up the others, which would
free it. What arrives is served gradients first: they free a graph. Among the senders of one lane turns are taken.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from splitlm.core.errors import NetworkError, ProtocolError
from splitlm.core.shape import Role
from splitlm.finetune.window import Lane, Out
from splitlm.model import payload
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Buffer, Frame, Header

Neighbour = tuple[Role, int]
LANES: tuple[Lane, ...] = ("gradient", "activation")
"""In the order in which they are served."""
SMALL_BYTES = 48 * 1024
"""Of a payload that a link takes at once, if it has room."""


@dataclass
class Counts:
    """Frames and bytes of one lane."""

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0


@dataclass
class _Line:
    channel: Channel
    outgoing: asyncio.Queue[tuple[Header, list[Buffer]]]
    waiting: deque[Frame] = field(default_factory=deque)
    sending: bool = False


class LinkLostError(NetworkError):
    """The way to a neighbour ended, or nothing comes of it.

    Args:
        who: the neighbour.
        why: in words.
    """

    def __init__(self, who: Neighbour, why: str) -> None:
        super().__init__(why.rstrip(". "), where=f"{who[0]} {who[1]}")
        self.who = who


class Plane:
    """Links by neighbour and lane. To be made in a running event loop; owns the channels it is given.

    Args:
        lost: told when the way to a neighbour ended.
        queue: frames that may wait for one link to take them.
    """

    def __init__(self, lost: Callable[[Neighbour, NetworkError], None], queue: int = 32) -> None:
        self._lost, self._queue = lost, queue
        self._lines: dict[tuple[Lane, Neighbour], _Line] = {}
        self._tasks: dict[tuple[Lane, Neighbour], list[asyncio.Task[None]]] = {}
        self._turns: dict[Lane, deque[Neighbour]] = {lane: deque() for lane in LANES}
        self._arrived = asyncio.Event()
        self._closing: list[asyncio.Task[None]] = []
        self.counts: dict[Lane, Counts] = {lane: Counts() for lane in LANES}

    @property
    def neighbours(self) -> set[Neighbour]:
        """Those with a link on every lane."""
        found = [{who for lane, who in self._lines if lane == wanted} for wanted in LANES]
        return set.intersection(*found)

    def attach(self, who: Neighbour, lane: Lane, channel: Channel) -> None:
        """Take over a link.

        Raises:
            ProtocolError: this neighbour has one on this lane already.
        """
        if (lane, who) in self._lines:
            raise ProtocolError(f"A second {lane} link came from {who[0]} {who[1]}", expected="one", where=channel.peer)
        line = self._lines[lane, who] = _Line(channel, asyncio.Queue(self._queue))
        self._turns[lane].append(who)
        self._tasks[lane, who] = [
            asyncio.create_task(self._receive(lane, who, line)),
            asyncio.create_task(self._send(lane, who, line)),
        ]

    def next(self) -> tuple[Neighbour, Frame] | None:
        """A frame that arrived, or None."""
        for lane in LANES:
            turns = self._turns[lane]
            for _ in range(len(turns)):
                turns.rotate(-1)
                who = turns[-1]
                if (line := self._lines.get((lane, who))) and line.waiting:
                    return who, line.waiting.popleft()
        self._arrived.clear()
        return None

    async def arrived(self) -> None:
        """Wait until there may be something."""
        await self._arrived.wait()

    async def send(self, who: Neighbour, out: Out) -> None:
        """Hand something to a link; waits only where its queue is full. What a lost neighbour was to get is dropped."""
        line = self._lines.get((out.lane, who))
        if line is None:
            return
        specs, buffers = [], []
        for tensor in out.tensors:
            spec, data = payload.dump(tensor)
            specs.append(spec)
            buffers.append(data)
        header = type(out.header)(
            **{name: getattr(out.header, name) for name in out.header.__struct_fields__ if name != "tensors"},
            tensors=tuple(specs),
        )
        if not self._sent_now(out.lane, who, line, header, buffers):
            await line.outgoing.put((header, list(buffers)))

    def _sent_now(self, lane: Lane, who: Neighbour, line: _Line, header: Header, buffers: Sequence[Buffer]) -> bool:
        """Whether a small frame that nothing is ahead of went out at once: waking another task takes as long."""
        if line.sending or not line.outgoing.empty() or sum(map(len, buffers)) > SMALL_BYTES:
            return False
        before = line.channel.bytes_out
        try:
            if not line.channel.send_now(header, buffers):
                return False
        except NetworkError as error:
            self._lost(who, error)
            return True
        self.counts[lane].frames_out += 1
        self.counts[lane].bytes_out += line.channel.bytes_out - before
        return True

    async def part(self, who: Neighbour) -> None:
        """Forget a neighbour: its links, and what came of it."""
        for lane in LANES:
            line = self._lines.pop((lane, who), None)
            tasks = self._tasks.pop((lane, who), [])
            if line is None:
                continue
            self._turns[lane].remove(who)
            me = asyncio.current_task()
            for task in tasks:
                if task is not me:
                    task.cancel()
            await asyncio.gather(*(task for task in tasks if task is not me), return_exceptions=True)
            # In its own time: a neighbour that is stopped takes nothing, and says no farewell.
            self._closing.append(asyncio.create_task(line.channel.close()))
            for frame in line.waiting:
                frame.release()

    def leave(self, who: Neighbour) -> None:
        """As ``part``, without waiting for it."""
        self._closing.append(asyncio.create_task(self.part(who)))

    async def close(self) -> None:
        """Part from all."""
        for who in {who for _, who in self._lines}:
            await self.part(who)
        await asyncio.gather(*self._closing)

    async def _receive(self, lane: Lane, who: Neighbour, line: _Line) -> None:
        counts = self.counts[lane]
        try:
            while True:
                frame = await line.channel.receive()
                counts.frames_in += 1
                counts.bytes_in += frame.nbytes
                line.waiting.append(frame)
                self._arrived.set()
        except NetworkError as error:
            self._lost(who, error)

    async def _send(self, lane: Lane, who: Neighbour, line: _Line) -> None:
        counts = self.counts[lane]
        try:
            while True:
                header, buffers = await line.outgoing.get()
                before, line.sending = line.channel.bytes_out, True
                await line.channel.send(header, buffers)
                line.sending = False
                counts.frames_out += 1
                counts.bytes_out += line.channel.bytes_out - before
        except NetworkError as error:
            self._lost(who, error)
