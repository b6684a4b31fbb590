"""A whole ring in one event loop: every part of the real one but processes, sockets and the control plane's star."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

import splitlm
from splitlm.check.compare import Run
from splitlm.core import messages
from splitlm.core.cut import Cut
from splitlm.core.errors import NetworkError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.core.shifts import Shift
from splitlm.infer.head import Head
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Relay
from splitlm.infer.request import Request
from splitlm.link.base import StreamChannel
from splitlm.link.memory import pair
from splitlm.migrate.mover import Mover
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.runner import Runner
from splitlm.model.stage import build_stages
from splitlm.node.follower import Follower
from splitlm.node.lead import Lead
from splitlm.node.serve import serve
from splitlm.node.window import Boundary, forced
from splitlm.node.work import StageWork
from splitlm.telemetry.record import Migration
from splitlm.telemetry.sinks import NullTrace
from splitlm.wire.frame import PROTOCOL
from splitlm.wire.handshake import Claims


@dataclass
class MemoryNode:
    """One node: its segments, and its part in moves."""

    relays: list[Relay]
    mover: Mover
    work: StageWork
    follower: Follower | None = None


@dataclass
class MemoryRing:
    """An open ring. ``moves[i]`` are the two ends of the link for moves between nodes i and i + 1."""

    head: Head
    lead: Lead
    nodes: list[MemoryNode]
    moves: list[tuple[StreamChannel, StreamChannel]]
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def cut(self) -> Cut:
        """The one that serves."""
        return self.nodes[0].mover.cut

    @property
    def boundaries(self) -> list[Boundary]:
        """What happened between windows."""
        return list(self.lead.windows.boundaries)

    @property
    def migrations(self) -> list[Migration]:
        """Every side of every move whose cost is known in full."""
        return [record for node in self.nodes for record in node.work.done]

    async def run(self, prompt: Sequence[int], new: int) -> Run:
        """Greedy tokens and their logits."""
        tokens: list[int] = []
        kept: list[torch.Tensor] = []
        async for item in self.head.generate(Request(tuple(prompt), new, logits=True)):
            tokens.append(item.token)
            if item.logits is not None:
                kept.append(item.logits)
        return Run(tokens, kept)


@contextlib.asynccontextmanager
async def memory_ring(
    files: ModelFiles,
    cut: Cut,
    *,
    window: int,
    shifts: Sequence[Shift] = (),
    prefill_chunk: int = 128,
    ctrl_timeout_s: float = 5.0,
    loader: Loader = "shard",
    compute: Sequence[str] = ("exact",),
) -> AsyncIterator[MemoryRing]:
    """A running ring of at least two stages; leaving ends it.

    Args:
        compute: engine of each node, from the first again where there are fewer.

    Raises:
        SplitlmError: the model cannot be loaded. What breaks the running ring is raised by ``MemoryRing.run``.
    """
    ends = [
        (pair(_claims(node), _claims(cut.next_node(node))), pair(_claims(node), _claims(node + 1), purpose="move"))
        for node in range(cut.stages)
    ]
    links, moves = [data for data, _ in ends], [move for _, move in ends[:-1]]
    runner, loading = Runner(torch.get_num_threads()), Runner(background=True)
    tasks: list[asyncio.Task[Any]] = []
    try:
        nodes, meters = [], [Meter(node, NullTrace()) for node in range(cut.stages)]
        for node in range(cut.stages):
            engine = compute[node % len(compute)]
            stages = await runner.run(
                lambda n=node, e=engine: build_stages(files, cut.held_by(n), loader=loader, compute=e)
            )
            relays = [Relay(stage, cut.epoch) for stage in stages]
            near = {node + 1: moves[node][0]} if node < len(moves) else {}
            near |= {node - 1: moves[node - 1][1]} if node else {}
            mover = Mover(node, stages[0], files, cut, near, runner, loading)
            nodes.append(MemoryNode(relays, mover, StageWork(node, mover, relays, meters[node], _ignore)))
        head = Head(
            nodes[0].relays,
            runner,
            meters[0],
            outbound=links[0][0],
            inbound=links[-1][1],
            context=files.context,
            prefill_chunk=prefill_chunk,
            last_segment=len(cut.segments) - 1,
        )

        async def send(node: int, message: messages.Message) -> None:
            follower = nodes[node].follower
            if follower is not None:
                follower.hear(cast(messages.Any, message))

        lead = Lead(
            head,
            nodes[0].mover,
            nodes[0].relays,
            meters[0],
            send,
            forced(shifts, window),
            window=window,
            ctrl_timeout_s=ctrl_timeout_s,
            changed=_ignore,
        )
        nodes[0].work = lead.work
        ring = MemoryRing(head, lead, nodes, moves, tasks)
        group = _Group(ring)
        for node in range(1, cut.stages):
            group.follow(node, ctrl_timeout_s, runner, links[node - 1][1], links[node][0])
        tasks.append(asyncio.create_task(group.live()))
        await asyncio.sleep(0)
        yield ring
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for two in (*links, *moves, ends[-1][1]):
            for end in two:
                end.cut()
                await end.close()
        runner.close()
        loading.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error


class _Group:
    """Everything that runs; the first error ends all of it, and the head's sessions with it."""

    def __init__(self, ring: MemoryRing) -> None:
        self._ring = ring
        self._parts = [ring.head.run(), *ring.lead.parts]

    def follow(
        self, node: int, ctrl_timeout_s: float, runner: Runner, inbound: StreamChannel, outbound: StreamChannel
    ) -> None:
        """A stage's part."""
        own = self._ring.nodes[node]

        async def say(message: messages.Message) -> None:
            self._ring.lead.heard(node, cast(messages.Any, message))

        follower = own.follower = Follower(
            say, own.work, node=node, epoch=own.mover.cut.epoch, ctrl_timeout_s=ctrl_timeout_s
        )
        self._parts += [
            own.mover.run(),
            follower.run(),
            serve(runner, own.relays[0], inbound, outbound, own.work.meter),
        ]

    async def live(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for part in self._parts:
                    group.create_task(part)
        except* SplitlmError as errors:
            self._ring.head.fail(first_error(errors))
        finally:
            self._ring.head.fail(NetworkError("The ring was closed"))


def _claims(node: int) -> Claims:
    return Claims(node=f"node {node}", version=splitlm.__version__, protocol=PROTOCOL)


def _ignore(_: Cut) -> None:
    """Nobody has to be told."""
