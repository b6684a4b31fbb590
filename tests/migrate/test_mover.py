"""Movers joined in memory: nothing is touched before a commit, and an abort at any point costs nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from splitlm.core.cut import Cut, make_cut, shift
from splitlm.core.errors import ModelError, ProtocolError
from splitlm.core.sampling import Sampling
from splitlm.link.memory import pair
from splitlm.migrate.costs import Costs
from splitlm.migrate.mover import Mover
from splitlm.model.load import ModelFiles
from splitlm.model.runner import Runner
from splitlm.model.stage import Stage, build_stages
from splitlm.wire.frame import Open
from tests.infer.rig import claims
from tests.tiny import VOCAB

CUT = make_cut(5, (2, 3))


@dataclass
class Trio:
    """Three stages with their movers; sessions are walked through them by hand."""

    files: ModelFiles
    stages: list[Stage]
    movers: list[Mover]
    loader: Runner
    seq: int = 0

    def feed(self, session: int, ids: Sequence[int]) -> torch.Tensor:
        """One step of a session through all stages; its logits."""
        for stage in self.stages:
            if session not in stage.sessions:
                stage.open(session)
        out: torch.Tensor | None = torch.tensor([list(ids)])
        position = self.stages[0].seen(session)
        for stage in self.stages:
            assert out is not None
            out = stage.forward(session, out, position, logits=stage.segment.head)
        assert out is not None
        return out.clone()

    async def prepare(self, cut: Cut) -> None:
        self.seq += 1
        async with asyncio.timeout(20):
            await asyncio.gather(*(mover.prepare(cut, self.seq) for mover in self.movers))

    async def move(self, cut: Cut) -> list[Costs]:
        await self.prepare(cut)
        sides = await asyncio.gather(*(mover.commit() for mover in self.movers))
        for mover in self.movers:
            await mover.release()
        return [side for mine in sides for side in mine]

    async def abort(self) -> None:
        for mover in self.movers:
            await mover.abort()

    def look(self) -> list[object]:
        """What each stage holds: its segment, its modules, its KV."""
        return [
            (
                stage.segment,
                [id(block) for block in stage.part.module.model.layers],
                {s: [(id(kv), kv.seen) for kv in stage._sessions[s].by_block.values()] for s in stage.sessions},
            )
            for stage in self.stages
        ]

    async def settle(self) -> None:
        """Let what was sent arrive."""
        for _ in range(200):
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def trio(folder: Path, cut: Cut = CUT) -> AsyncIterator[Trio]:
    files = ModelFiles(folder)
    stages = [build_stages(files, cut.held_by(node))[0] for node in range(cut.stages)]
    links = [pair(claims(f"node {i}"), claims(f"node {i + 1}"), purpose="move") for i in range(cut.stages - 1)]
    runner, loader = Runner(), Runner(background=True)
    movers = []
    for node in range(cut.stages):
        near = {node + 1: links[node][0]} if node < len(links) else {}
        near |= {node - 1: links[node - 1][1]} if node else {}
        movers.append(Mover(node, stages[node], files, cut, near, runner, loader))
    tasks = [asyncio.create_task(mover.run()) for mover in movers]
    try:
        yield Trio(files, stages, movers, loader)
        assert not any(task.done() for task in tasks), [task.exception() for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for ends in links:
            for end in ends:
                end.cut()
                await end.close()
        runner.close()
        loader.close()


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def unmoved(folder: Path, steps: Sequence[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """Logits of these steps where nothing ever moves."""

    async def story() -> list[torch.Tensor]:
        async with trio(folder) as three:
            return [three.feed(session, step) for session, step in steps]

    return asyncio.run(story())


STEPS = [(1, ids(20, 1)), (2, ids(5, 2)), (1, [7]), (2, [9]), (1, [11]), (2, [13])]


@pytest.fixture
def gemma(tiny: Callable[[str], Path]) -> Path:
    """Sliding and full blocks."""
    return tiny("gemma3")


def test_the_stages_are_untouched_until_the_commit(gemma: Path) -> None:
    async def story() -> list[torch.Tensor]:
        async with trio(gemma) as three:
            seen = [three.feed(*step) for step in STEPS[:2]]
            before = three.look()
            new = shift(CUT, 1, -1)
            await asyncio.gather(*(mover.bring(new) for mover in three.movers))
            await three.settle()
            assert three.look() == before
            assert three.movers[1].arrivals[0].nbytes > 0, "rows come while tokens flow"
            await three.prepare(new)
            assert three.look() == before
            await three.abort()
            await three.settle()
            assert three.look() == before
            assert three.movers[1].arrivals[0].nbytes == 0
            seen += [three.feed(*step) for step in STEPS[2:4]]
            await three.move(new)
            assert three.look() != before and [s.segment for s in three.stages] == list(new.segments)
            return seen + [three.feed(*step) for step in STEPS[4:]]

    for ours, theirs in zip(asyncio.run(story()), unmoved(gemma, STEPS), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("point", ["announced", "brought", "prepared", "one node only", "rows on their way"])
@pytest.mark.parametrize(("boundary", "k"), [(1, 1), (1, -1), (2, 1)])
def test_an_abort_at_any_point_and_the_same_move_again(point: str, boundary: int, k: int, gemma: Path) -> None:
    async def story() -> list[torch.Tensor]:
        cut = make_cut(5, (2, 4)) if (boundary, k) == (1, 1) else make_cut(5, (2, 3))
        async with trio(gemma, cut) as three:
            seen = [three.feed(*step) for step in STEPS[:3]]
            new = shift(cut, boundary, k)
            for _ in range(2):
                match point:
                    case "announced":
                        jobs = [asyncio.create_task(mover.bring(new)) for mover in three.movers]
                        await asyncio.sleep(0.002)
                        for job in jobs:
                            job.cancel()
                        await asyncio.wait(jobs)
                    case "brought" | "rows on their way":
                        await asyncio.gather(*(mover.bring(new) for mover in three.movers))
                    case "prepared":
                        await three.prepare(new)
                    case _:
                        await three.movers[boundary].bring(new)
                if point != "rows on their way":
                    await three.settle()
                await three.abort()
            seen.append(three.feed(*STEPS[3]))
            await asyncio.gather(*(mover.bring(new) for mover in three.movers))
            seen.append(three.feed(*STEPS[4]))
            sides = await three.move(new)
            assert {side.role for side in sides} == {"donor", "receiver"}
            seen.append(three.feed(*STEPS[5]))
            return seen

    for ours, theirs in zip(asyncio.run(story()), unmoved(gemma, STEPS), strict=True):
        assert torch.equal(ours, theirs)


def test_bringing_that_was_cancelled_mid_way_and_asked_for_again_sends_nothing_twice(gemma: Path) -> None:
    """The head announces the same cut anew, without an abort between."""

    async def story() -> None:
        async with trio(gemma) as three:
            for session in range(1, 30):
                three.feed(session, ids(100, session))
            new = shift(CUT, 2, 1)  # block 3 comes from node 2
            for steps in (1, 7, 23, 60):
                job = asyncio.create_task(three.movers[2].bring(new))
                for _ in range(steps):
                    await asyncio.sleep(0)
                job.cancel()
                await asyncio.wait([job])
            before = len(three.files.built)
            sides = await three.move(new)
            (taken,) = [side for side in sides if side.role == "receiver"]
            assert taken.kv_tokens == 29 * 7, "block 3 slides: window 8 keeps 7 rows"
            assert len(three.files.built) == before + 1

    asyncio.run(story())


def test_sessions_that_open_and_end_while_rows_travel(gemma: Path) -> None:
    async def story() -> list[torch.Tensor]:
        async with trio(gemma) as three:
            three.feed(3, ids(30, 3))
            seen = [three.feed(*STEPS[0])]
            new = shift(CUT, 1, -1)
            await asyncio.gather(*(mover.bring(new) for mover in three.movers))
            for stage in three.stages:
                stage.close(3)
            seen += [three.feed(*step) for step in STEPS[1:4]]  # session 2 is new to the donor's rows
            sides = await three.move(new)
            rows = {side.role: side.kv_tokens for side in sides}
            assert rows["receiver"] == 7 + 6, "block 1 slides; session 1 keeps 7 rows, session 2 all 6"
            assert all(mover.arrivals[n].nbytes == 0 for mover in three.movers for n in mover.arrivals)
            return seen + [three.feed(*step) for step in STEPS[4:]]

    for ours, theirs in zip(asyncio.run(story()), unmoved(gemma, STEPS), strict=True):
        assert torch.equal(ours, theirs)


def test_two_neighbours_that_send_megabytes_at_once_do_not_block_each_other(tiny: Callable[[str], Path]) -> None:
    async def story() -> None:
        async with trio(tiny("llama"), make_cut(5, (2, 4))) as three:
            cut = three.movers[0].cut
            for session in range(1, 81):
                three.feed(session, ids(120, session))
            for _ in range(2):
                async with asyncio.timeout(60):
                    up, down = shift(cut, 1, -1), shift(cut, 1, 1)
                    await asyncio.gather(three.movers[0].bring(up), three.movers[1].bring(down))
                await three.settle()
                assert three.movers[0].arrivals[1].nbytes > 2_000_000 < three.movers[1].arrivals[0].nbytes
                await three.abort()
            await three.move(make_chain(cut))

    asyncio.run(story())


def make_chain(cut: Cut) -> Cut:
    """Boundaries 1 and 2 both one down: node 1 receives from node 0 and gives to node 2."""
    both = shift(shift(cut, 1, -1), 2, -1)
    return Cut(both.blocks, both.segments, both.nodes, cut.epoch + 1)


def test_a_change_that_another_one_replaces_leaves_no_row(gemma: Path) -> None:
    async def story() -> None:
        async with trio(gemma) as three:
            three.feed(1, ids(30, 3))
            await three.movers[0].bring(shift(CUT, 1, -1))
            await three.settle()
            assert three.movers[1].arrivals[0].nbytes > 0
            await asyncio.gather(*(mover.bring(shift(CUT, 2, 1)) for mover in three.movers))
            await three.settle()
            assert three.movers[1].arrivals[0].nbytes == 0
            await three.move(shift(CUT, 2, 1))

    asyncio.run(story())


def test_a_receiver_that_is_slow_to_abort_keeps_the_rows_of_the_next_try(gemma: Path) -> None:
    """The donor has heard ABORT and the next announcement; the receiver has not yet heard the ABORT."""

    async def story() -> None:
        async with trio(gemma) as three:
            three.feed(1, ids(30, 3))
            new = shift(CUT, 1, -1)
            await three.prepare(new)
            await three.movers[0].abort()
            await three.movers[2].abort()
            await three.movers[0].bring(new)
            await three.settle()
            await three.movers[1].abort()
            sides = await three.move(new)
            assert {side.role: side.kv_tokens for side in sides} == {"donor": 7, "receiver": 7}

    asyncio.run(story())


def test_what_left_is_freed_without_the_garbage_collector(gemma: Path) -> None:
    async def story() -> None:
        async with trio(gemma) as three:
            three.feed(1, ids(30, 3))
            block = three.stages[0].part.module.model.layers[1]
            kv = weakref.ref(three.stages[0]._sessions[1].by_block[1])
            tensors = list(block.parameters())
            assert sum(t.nbytes for t in tensors) > 10_000
            await three.prepare(shift(CUT, 1, -1))
            await asyncio.gather(*(mover.commit() for mover in three.movers))
            assert kv() is not None and sum(t.nbytes for t in tensors) > 10_000, "kept until everyone has applied it"
            for mover in three.movers:
                await mover.release()
            assert kv() is None
            assert all(t.nbytes == 0 and t.untyped_storage().nbytes() == 0 for t in tensors)

    gc.disable()
    try:
        asyncio.run(story())
    finally:
        gc.enable()


def test_figures_are_exact_and_say_what_left_in_the_background(gemma: Path) -> None:
    async def story() -> None:
        cut = make_cut(5, (1, 3))
        async with trio(gemma, cut) as three:
            three.feed(1, ids(40, 3))
            new = shift(cut, 2, -1)  # block 2, full attention
            await asyncio.gather(*(mover.bring(new) for mover in three.movers))
            three.feed(1, [5])
            sides = {side.role: side for side in await three.move(new)}
            row = 2 * 2 * 16 * 4
            assert sides["receiver"].kv_bytes == 41 * row and sides["receiver"].kv_tokens == 41
            assert sides["donor"].kv_bytes == 41 * row and sides["donor"].background_bytes == 40 * row
            assert sides["receiver"].cached is not False, "it was read a moment ago"
            assert sides["receiver"].read_ms > 0 < sides["donor"].pack_ms
            three.feed(1, [6])
            back = shift(new, 2, 1)
            sides = {side.role: side for side in await three.move(back)}  # nothing was announced
            assert sides["donor"].background_bytes == 0 and sides["donor"].kv_bytes == 42 * row

    asyncio.run(story())


def test_a_block_that_cannot_be_built_fails_the_preparation_and_nothing_else(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with trio(tiny("llama")) as three:
            three.feed(1, ids(10, 3))
            before = three.look()

            def gone(*_: object) -> None:
                raise ModelError("The file is gone")

            with monkeypatch.context() as patch:
                patch.setattr(three.files, "load_blocks", gone)
                with pytest.raises(ModelError, match="gone"):
                    await three.movers[1].bring(shift(CUT, 1, -1))
                with pytest.raises(ModelError, match="gone"):
                    await three.movers[1].prepare(shift(CUT, 1, -1), 1)
            await three.abort()
            assert three.look() == before
            await three.move(shift(CUT, 1, -1))

    asyncio.run(story())


def test_a_commit_of_nothing_is_a_protocol_error(tiny: Callable[[str], Path]) -> None:
    async def story() -> None:
        async with trio(tiny("llama")) as three:
            with pytest.raises(ProtocolError, match="never prepared"):
                await three.movers[0].commit()

    asyncio.run(story())


async def _wrong(folder: Path) -> None:
    files = ModelFiles(folder)
    (stage,) = build_stages(files, CUT.held_by(1))
    ours, theirs = pair(claims("node 1"), claims("node 2"), purpose="data")
    runner = Runner()
    mover = Mover(1, stage, files, CUT, {2: theirs}, runner, runner)
    task = asyncio.create_task(mover.run())
    try:
        await ours.send(Open(session=1, context=4, sampling=Sampling()))
        async with asyncio.timeout(5):
            with pytest.raises(ProtocolError, match="node 2: A Open frame came"):
                await task
    finally:
        for end in (ours, theirs):
            end.cut()
            await end.close()
        runner.close()


def test_a_neighbour_that_sends_what_is_no_move(tiny: Callable[[str], Path]) -> None:
    asyncio.run(_wrong(tiny("llama")))
