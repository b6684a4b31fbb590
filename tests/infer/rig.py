"""A ring in one event loop: heads and stages joined in memory, for tests of what frames do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from splitlm.core.cut import Cut, make_cut
from splitlm.core.errors import NetworkError
from splitlm.infer.head import Head
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.infer.request import Request
from splitlm.link.base import StreamChannel
from splitlm.link.memory import pair
from splitlm.model.load import ModelFiles
from splitlm.model.runner import Runner
from splitlm.model.stage import build_stages
from splitlm.telemetry.record import Record
from splitlm.telemetry.sinks import NullTrace
from splitlm.wire.frame import PROTOCOL, Header
from splitlm.wire.handshake import Claims


def claims(name: str) -> Claims:
    return Claims(node=name, version="1", protocol=PROTOCOL)


def relays(files: ModelFiles, cut: Cut, node: int, compute: str = "exact") -> list[Relay]:
    return [Relay(stage, cut.epoch, node) for stage in build_stages(files, cut.held_by(node), compute=compute)]


@dataclass
class Kept(NullTrace):
    """A sink that keeps what it is given."""

    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        """Keep it."""
        self.records.append(record)


@dataclass
class Rig:
    """``links[i]`` are the two ends of the link from node i to the next; ``seen[i]`` what node i + 1 received.

    ``records`` are the head's.
    """

    head: Head
    stages: list[list[Relay]]
    links: list[tuple[StreamChannel, StreamChannel]]
    seen: list[list[Header]] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)

    async def tokens(self, request: Request) -> list[int]:
        return [item.token async for item in self.head.generate(request)]

    @property
    def open_sessions(self) -> list[int]:
        """Of all stages, the head's own included."""
        return [number for node in self.stages for relay in node for number in relay.stage.sessions]


@contextlib.asynccontextmanager
async def ring(
    folder: Path, boundaries: Sequence[int], *, private: bool = False, chunk: int = 4, delay_s: float = 0.0
) -> AsyncIterator[Rig]:
    """A running ring; ``delay_s`` passes before each stage takes a frame."""
    files = ModelFiles(folder)
    cut = make_cut(files.blocks, boundaries, private=private)
    nodes = [relays(files, cut, node) for node in range(cut.stages)]
    links = [pair(claims(f"node {i}"), claims(f"node {cut.next_node(i)}")) for i in range(cut.stages)]
    runner, kept = Runner(), Kept()
    head = Head(
        nodes[0],
        runner,
        Meter(0, kept),
        outbound=links[0][0] if cut.stages > 1 else None,
        inbound=links[-1][1] if cut.stages > 1 else None,
        context=files.context,
        prefill_chunk=chunk,
        last_segment=len(cut.segments) - 1,
    )
    rig = Rig(head, nodes, links, [[] for _ in range(cut.stages - 1)], kept.records)

    async def stage(node: int) -> None:
        inbound, outbound, seen = links[node - 1][1], links[node][0], rig.seen[node - 1]
        while True:
            frame = await inbound.receive()
            seen.append(frame.header)
            await asyncio.sleep(delay_s)
            step = await runner.run(nodes[node][0].handle, frame)
            frame.release()
            if step.header is not None:
                await outbound.send(step.header, step.tensors)

    tasks = [asyncio.create_task(stage(node)) for node in range(1, cut.stages)]

    async def run() -> None:
        try:
            await head.run()
        except NetworkError as error:
            head.fail(error)

    tasks.append(asyncio.create_task(run()))
    try:
        yield rig
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ends in links:
            for end in ends:
                end.cut()
                await end.close()
        runner.close()
