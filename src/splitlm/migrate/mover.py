"""A node's part in moving blocks: weights from its own disk, KV from its neighbour, while tokens flow.

The receiver builds blocks on the loader thread. The donor sends the rows of tokens already decoded, some hundred at a
time, over a link that the pair keeps for this. Once the ring stands still, only rows that came since are left; a
``Mark`` says that they were the last. The donor keeps what it gave until everyone has applied the change: an abort
costs nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from splitlm.core.cut import Cut, Move, diff
from splitlm.core.errors import ProtocolError, SplitlmError
from splitlm.core.groups import first_error
from splitlm.migrate.arrivals import GIVEN_UP, Arrivals, KVShape
from splitlm.migrate.costs import Costs
from splitlm.model import payload
from splitlm.model.cache import BlockKV
from splitlm.model.load import ModelFiles
from splitlm.model.runner import Runner
from splitlm.model.stage import Moved, Stage
from splitlm.wire.channel import Channel
from splitlm.wire.frame import Mark, Rows

ROWS_PER_FRAME = 256
"""Rows copied out of a live cache at a time: a decode step waits for no more than this."""


@dataclass
class _Change:
    """One change of the cut as this node takes part in it.

    Attributes:
        number: of the change on this node's links; a later one replaces it.
        sent: position up to which the rows of (block, session) were sent.
        brought: whether the background part is done.
        broken: a step of it was begun and not ended: what was sent is not known, so the next one begins anew.
    """

    cut: Cut
    number: int
    out: list[Move]
    into: list[Move]
    blocks: dict[int, nn.Module] = field(default_factory=dict)
    sent: dict[tuple[int, int], int] = field(default_factory=dict)
    brought: bool = False
    broken: bool = False
    given: dict[int, Costs] = field(default_factory=dict)
    taken: dict[int, Costs] = field(default_factory=dict)


class Mover:
    """Moves blocks of one stage to and from its neighbours. One of its methods runs at a time, beside ``run``.

    Args:
        node: this node's number.
        stage: its movable stage.
        cut: the one that serves.
        links: the channel to each neighbour that is kept for moving.
        runner: the compute thread; live caches are read there, between steps.
        loader: the thread that builds blocks.
    """

    def __init__(
        self,
        node: int,
        stage: Stage,
        files: ModelFiles,
        cut: Cut,
        links: Mapping[int, Channel],
        runner: Runner,
        loader: Runner,
    ) -> None:
        self.cut = cut
        self._node, self._stage, self._files = node, stage, files
        self._links, self._runner, self._loader = dict(links), runner, loader
        self._shape = KVShape(files.windows, *files.kv_heads, files.dtype, files.context)
        self.arrivals = {neighbour: Arrivals(self._shape, f"node {neighbour}") for neighbour in links}
        self._change: _Change | None = None
        self._number = 0
        self._kept: list[Moved] = []

    def kv_bytes(self, blocks: Sequence[int], seen: Sequence[int]) -> int:
        """Bytes of keys and values of these blocks in sessions that have seen so many tokens."""
        rows = sum(self._shape.kept(block, tokens) for block in blocks for tokens in seen)
        return rows * self._shape.row_bytes

    async def run(self) -> None:
        """Take what neighbours send, until cancelled.

        Raises:
            NetworkError: a neighbour's link broke, or brought what no move expects.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for neighbour, link in self._links.items():
                    group.create_task(self._receive(link, self.arrivals[neighbour]))
        except* SplitlmError as errors:
            raise first_error(errors) from None

    async def _receive(self, link: Channel, arrivals: Arrivals) -> None:
        while True:
            frame = await link.receive()
            try:
                arrivals.take(frame)
            finally:
                frame.release()

    async def bring(self, cut: Cut) -> None:
        """The background part: build the blocks that come, send the rows of the blocks that leave.

        Raises:
            ModelError: a block cannot be built here.
            PeerLostError: a neighbour is gone.
        """
        change = await self._bring(cut)
        for costs in change.given.values():
            costs.background_bytes = costs.kv_bytes

    async def _bring(self, cut: Cut) -> _Change:
        change = await self._begin(cut)
        if change.brought:
            return change
        change.broken = True
        for move in change.into:
            if move.block not in change.blocks:
                built = await self._loader.run(self._build, move.block, change.taken[move.source])
                change.blocks[move.block] = built
        for session in self._stage.sessions:
            until = self._stage.seen(session)
            for move in change.out:
                await self._send(change, move, session, until)
        change.brought, change.broken = True, False
        return change

    async def _begin(self, cut: Cut) -> _Change:
        """The change that brings this cut: the one at hand, or a new one."""
        old = self._change
        if old is not None and old.cut == cut and not old.broken:
            return old
        await self._give_up()
        self._number += 1
        moves = diff(self.cut, cut)
        change = self._change = _Change(
            cut,
            self._number,
            [move for move in moves if move.source == self._node],
            [move for move in moves if move.target == self._node],
        )
        for move in change.out:
            given = change.given.setdefault(move.target, Costs(move.target, "donor", cut.epoch))
            given.blocks.append(move.block)
        for move in change.into:
            taken = change.taken.setdefault(move.source, Costs(move.source, "receiver", cut.epoch))
            taken.blocks.append(move.block)
        if old is not None and old.cut == cut:  # what was built is as good for this one
            change.blocks.update(old.blocks)
            for source, costs in old.taken.items():
                taken = change.taken[source]
                taken.construct_ms, taken.read_ms, taken.cached = costs.construct_ms, costs.read_ms, costs.cached
                taken.weight_pack_ms = costs.weight_pack_ms
        return change

    async def _give_up(self) -> None:
        """Forget the change at hand, and let those who were sent rows of it forget them."""
        change, self._change = self._change, None
        if change is not None:
            for target in change.given:
                await self._links[target].send(Mark(change=change.number, seq=GIVEN_UP, sessions=()))

    def _build(self, block: int, costs: Costs) -> nn.Module:
        timings: dict[str, float] = {}
        warm = self._files.in_page_cache(block)
        costs.cached = warm if costs.cached is None or warm is None else costs.cached and warm
        (module,) = self._stage.load_blocks([block], timings)
        costs.construct_ms += timings["construct"]
        costs.read_ms += timings["read"]
        costs.weight_pack_ms += timings["pack"]
        return module

    async def prepare(self, cut: Cut, seq: int) -> None:
        """The ring stands still: send the rows that are left, or wait for them, and check that all came.

        Raises:
            ModelError: a block cannot be built here.
            ProtocolError: rows are missing, or more came than were due.
        """
        change = await self._bring(cut)
        change.broken = True
        started = time.perf_counter()
        sessions = {session: self._stage.seen(session) for session in self._stage.sessions}
        for target, costs in change.given.items():
            for move in change.out:
                if move.target == target:
                    for session, seen in sessions.items():
                        await self._send(change, move, session, seen)
            mark = Mark(change=change.number, seq=seq, sessions=tuple(sessions.items()))
            await self._links[target].send(mark)
            costs.kv_ms = (time.perf_counter() - started) * 1e3
        for source, costs in change.taken.items():
            arrivals = self.arrivals[source]
            costs.kv_bytes, costs.kv_tokens = await arrivals.complete(seq, costs.blocks, sessions)
            costs.kv_ms = (time.perf_counter() - started) * 1e3

    async def commit(self) -> list[Costs]:
        """Apply the prepared change; nothing may be computing. Returns what each of its moves cost this node."""
        change, self._change = self._change, None
        if change is None:
            raise ProtocolError("A change was committed that was never prepared", expected="PREPARE before COMMIT")
        started = time.perf_counter()
        kv: dict[int, dict[int, BlockKV]] = {}
        for move in change.into:
            for session, rows in self.arrivals[move.source].pick(move.block).items():
                kv.setdefault(session, {})[move.block] = rows
        if change.into or change.out:
            self._kept.append(await self._runner.run(self._apply, change, kv))
        self.cut = change.cut
        for arrivals in self.arrivals.values():
            arrivals.clear()  # sessions that ended meanwhile; nobody sends anything new before this node's DONE
        sides = [*change.given.values(), *change.taken.values()]
        for costs in sides:
            costs.commit_ms = (time.perf_counter() - started) * 1e3
        return sides

    def _apply(self, change: _Change, kv: dict[int, dict[int, BlockKV]]) -> Moved:
        segment = change.cut.held_by(self._node)[0]  # a private ring's last segment stays where it is
        return self._stage.change(segment, change.blocks, kv)

    async def abort(self) -> None:
        """Forget a change that was not committed; the stage was never touched.

        Raises:
            PeerLostError: a neighbour is gone.
        """
        await self._give_up()

    async def release(self) -> float:
        """Give back the memory of what left, on the loader thread; milliseconds that took."""
        started = time.perf_counter()
        kept, self._kept = self._kept, []
        for moved in kept:
            await self._loader.run(moved.release)
        return (time.perf_counter() - started) * 1e3

    async def _send(self, change: _Change, move: Move, session: int, until: int) -> None:
        """Send the rows of one block and session up to a position."""
        key = (move.block, session)
        while change.sent.get(key, 0) < until:
            packing = time.perf_counter()
            k, v, position = await self._runner.run(
                self._stage.take_rows, session, move.block, change.sent.get(key, 0), ROWS_PER_FRAME
            )
            if not k.shape[0]:
                return  # the session ended meanwhile
            costs = change.given[move.target]
            costs.pack_ms += (time.perf_counter() - packing) * 1e3
            (k_spec, k_view), (v_spec, v_view) = payload.dump(k), payload.dump(v)
            rows = Rows(
                change=change.number, session=session, block=move.block, position=position, tensors=(k_spec, v_spec)
            )
            await self._links[move.target].send(rows, [k_view, v_view])
            change.sent[key] = position + k.shape[0]
            costs.kv_bytes += k.nbytes + v.nbytes
            costs.kv_tokens += k.shape[0]
