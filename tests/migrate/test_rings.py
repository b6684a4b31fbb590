"""Whole rings in one loop: a move changes no token and no bit, wherever and whenever it happens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from splitlm.check.compare import Comparison, Run, compare
from splitlm.check.inmemory import MemoryRing, memory_ring
from splitlm.core.cut import Cut, all_boundaries, make_cut, shift
from splitlm.core.errors import CutError, ProtocolError, SplitlmError
from splitlm.core.shifts import Shift
from splitlm.migrate.arrivals import Arrivals
from splitlm.migrate.mover import Mover
from splitlm.model import stage as stages
from splitlm.model.cache import BlockKV
from splitlm.model.compute.products import KINDS
from splitlm.model.load import ModelFiles
from splitlm.node.work import StageWork
from tests.parity.chain import long_prompt

NEW = 14
WINDOW = 3
PROMPT = long_prompt()
SHORT = [1, 40, 50, 60]


def run(
    files: ModelFiles,
    cut: Cut,
    shifts: Sequence[Shift] = (),
    prompts: Sequence[Sequence[int]] = (PROMPT,),
    new: Sequence[int] = (NEW,),
    chunk: int = 128,
    compute: Sequence[str] = ("exact",),
) -> tuple[list[Run], MemoryRing]:
    """Every prompt at once; the texts, and the ring as it was then."""

    async def story() -> tuple[list[Run], MemoryRing]:
        given = {"window": WINDOW, "shifts": shifts, "prefill_chunk": chunk, "compute": compute}
        async with memory_ring(files, cut, **given) as ring:  # type: ignore[arg-type]
            counts = list(new) * len(prompts) if len(new) == 1 else new
            async with asyncio.timeout(60):
                made = await asyncio.gather(*(ring.run(p, n) for p, n in zip(prompts, counts, strict=True)))
            for node in ring.nodes:
                node.work.flush()
            return list(made), ring

    return asyncio.run(story())


def same(made: Run, other: Run) -> Comparison:
    return compare(made, other, "float32")


def fitting(cut: Cut) -> list[Shift]:
    found = []
    for boundary in range(1, cut.stages):
        for k in (-2, -1, 1, 2):
            try:
                shift(cut, boundary, k)
            except CutError:
                continue
            found.append(Shift(1, boundary, k))
    return found


@pytest.mark.parametrize(("family", "compute"), [("llama", "exact"), ("gemma3", "exact"), ("llama", "fast")])
def test_every_cut_boundary_and_size_at_every_position(family: str, compute: str, tiny: Callable[[str], Path]) -> None:
    if why := compute != "exact" and KINDS[compute].missing():
        pytest.skip(f"{compute} does not work here: {why}")
    files = ModelFiles(tiny(family))
    cases = 0
    for count in (2, 3):
        for edges in all_boundaries(files.blocks, count):
            cut = make_cut(files.blocks, edges)
            (unmoved,), _ = run(files, cut, compute=[compute])
            for i, asked in enumerate(fitting(cut)):
                at = [WINDOW, 2 * WINDOW, 3 * WINDOW, 4 * WINDOW] if len(set(edges)) == 1 else [WINDOW * (1 + i % 4)]
                for position in at:
                    (made,), ring = run(files, cut, [Shift(position, asked.boundary, asked.k)], compute=[compute])
                    (moved,) = [b for b in ring.boundaries if b.moves]
                    assert moved.laps == position and len(moved.moves) == abs(asked.k)
                    assert same(made, unmoved).bit_equal, (edges, asked, position)
                    received = sum(side.kv_bytes for side in ring.migrations if side.role == "receiver")
                    assert received == moved.kv_bytes > 0
                    cases += 1
    assert cases > 40


@pytest.mark.parametrize("engines", [("exact", "fast", "exact"), ("fast", "exact", "fast")])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_blocks_move_between_engines(family: str, engines: Sequence[str], tiny: Callable[[str], Path]) -> None:
    """Tokens stay; logits do within what float16 weights change, here of weights that are no numbers of float16."""
    if why := KINDS["fast"].missing():
        pytest.skip(f"fast does not work here: {why}")
    files = ModelFiles(tiny(family))
    cut, shifts = make_cut(5, (2, 3)), [Shift(3, 1, -1), Shift(6, 2, 1), Shift(9, 1, 1)]
    (exact,), _ = run(files, cut)
    (made,), ring = run(files, cut, shifts, compute=engines)
    assert [b.laps for b in ring.boundaries if b.moves] == [3, 6, 9]
    packed = [side.weight_pack_ms or 0.0 for side in ring.migrations if side.role == "receiver"]
    assert any(packed) and len(packed) == 3
    worst = max((a - b).abs().max().item() for a, b in zip(made.logits, exact.logits, strict=True))
    assert made.tokens == exact.tokens and 0 < worst < 0.1


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_families_and_types(family: str, dtype: str, tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny(family), dtype=dtype)
    cut = make_cut(5, (2, 3))
    (unmoved,), _ = run(files, cut)
    (made,), ring = run(files, cut, [Shift(3, 1, -1), Shift(6, 2, 1), Shift(9, 1, 1)])
    assert [b.laps for b in ring.boundaries if b.moves] == [3, 6, 9]
    assert same(made, unmoved).bit_equal


def test_several_sessions_one_of_them_in_the_middle_of_its_prompt(tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny("gemma3"))
    cut = make_cut(5, (1, 3))
    prompts = [SHORT, long_prompt(90, 1), long_prompt(30, 2), [1, 9]]
    new, chunk = (40, 5, 12, 20), 4
    shifts = [Shift(3, 2, -1), Shift(6, 2, 1), Shift(9, 1, 1)]
    unmoved, _ = run(files, cut, (), prompts, new, chunk)
    made, ring = run(files, cut, shifts, prompts, new, chunk)
    first = next(b for b in ring.boundaries if b.moves)
    assert sum(bool(b.moves) for b in ring.boundaries) == 3
    assert first.laps == 3
    for ours, theirs in zip(made, unmoved, strict=True):
        assert same(ours, theirs).bit_equal


def test_the_long_prompt_really_is_half_fed_when_the_blocks_move(tiny: Callable[[str], Path]) -> None:
    """Else the test above would test nothing of the kind."""
    files = ModelFiles(tiny("llama"))
    _, ring = run(files, make_cut(5, (1, 3)), [Shift(3, 2, -1)], [SHORT, long_prompt(100, 1)], (40, 5), 2)
    first = next(b for b in ring.boundaries if b.moves)
    row = 2 * 2 * 16 * 4
    seen = first.kv_bytes // row - (len(SHORT) + first.laps - 1)
    assert 0 < seen < 100


def test_repeated_moves_there_and_back(tiny: Callable[[str], Path]) -> None:
    files = ModelFiles(tiny("gemma3"))
    cut = make_cut(5, (2, 3))
    shifts = [Shift(3 * i, 1 + i % 2, (-1) ** (i // 2)) for i in range(1, 9)]
    possible, at = [], cut
    for asked in shifts:
        try:
            at = shift(at, asked.boundary, asked.k)
        except CutError:
            continue
        possible.append(asked)
    assert len(possible) > 4
    (unmoved,), _ = run(files, cut, (), [SHORT], (40,))
    (made,), ring = run(files, cut, possible, [SHORT], (40,))
    assert ring.cut == at and ring.cut.epoch == len(possible)
    assert same(made, unmoved).bit_equal


@pytest.mark.parametrize(
    ("edges", "tail", "asked"),
    [
        ((1, 3), 0, (1, -1)),
        ((0, 3), 0, (1, 1)),
        ((0, 3), 0, (1, 2)),
        ((2, 3), 1, (1, -2)),
        ((1, 2), 2, (1, -1)),
    ],
)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_private_rings_also_where_the_front_holds_no_block(
    edges: tuple[int, ...], tail: int, asked: tuple[int, int], family: str, tiny: Callable[[str], Path]
) -> None:
    files = ModelFiles(tiny(family))
    cut = make_cut(5, edges, private=True, tail_blocks=tail)
    end = Shift(6, asked[0], -asked[1])
    (unmoved,), _ = run(files, cut)
    (made,), ring = run(files, cut, [Shift(3, *asked), end])
    assert sum(bool(b.moves) for b in ring.boundaries) == 2
    assert ring.cut.boundaries == cut.boundaries
    assert same(made, unmoved).bit_equal


def test_200_tokens_have_9_barriers_of_20(tiny: Callable[[str], Path]) -> None:
    async def story() -> list[int]:
        async with memory_ring(ModelFiles(tiny("llama")), make_cut(5, (2,)), window=20) as ring:
            await ring.run([1], 100)
            await ring.run([1], 100)
            return [b.laps for b in ring.boundaries]

    assert asyncio.run(story()) == [20 * i for i in range(1, 9)], "each text by itself: 4 barriers for 100 tokens"


def test_a_stage_that_refuses_leaves_the_old_cut_serving(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(tiny("llama"))
    cut = make_cut(5, (2, 3))
    (unmoved,), _ = run(files, cut)
    asked = []

    def gone(*_: object) -> None:
        asked.append(1)
        raise ProtocolError("no such file")

    monkeypatch.setattr(files, "load_blocks", gone)
    (made,), ring = run(files, cut, [Shift(3, 1, -1)])
    assert len(asked) >= 2 and ring.cut == cut
    reasons = {b.outcome.reason for b in ring.boundaries if b.outcome.aborted}
    assert len(reasons) >= 1 and all("Node 1 refused: no such file" in reason for reason in reasons)
    assert same(made, unmoved).bit_equal


def test_blocks_that_are_still_on_their_way_put_the_move_off_and_nothing_is_built_twice(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(tiny("llama"))
    cut = make_cut(5, (2, 3))
    (unmoved,), _ = run(files, cut)
    load = files.load_blocks
    built = []

    def slow(*arguments: Any) -> Any:
        import time

        built.append(arguments[0])
        time.sleep(0.7)
        return load(*arguments)

    monkeypatch.setattr(files, "load_blocks", slow)

    async def story() -> tuple[Run, MemoryRing]:
        async with memory_ring(files, cut, window=WINDOW, shifts=[Shift(3, 1, -1)], ctrl_timeout_s=0.5) as ring:
            return await ring.run(PROMPT, NEW), ring

    made, ring = asyncio.run(story())
    assert [b.late for b in ring.boundaries[:1]] == [True]
    assert any(b.moves for b in ring.boundaries) and built == [[1]]
    assert same(made, unmoved).bit_equal


def test_sessions_that_begin_or_end_while_the_ring_stands_do_not_spoil_the_barrier(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open and Close frames wait at the gate: else stages would not have the same sessions."""
    files = ModelFiles(tiny("llama"))
    prepare = StageWork.prepare

    async def story() -> tuple[list[Run], MemoryRing]:
        async with memory_ring(files, make_cut(5, (2, 3)), window=WINDOW, shifts=[Shift(6, 1, -1)]) as ring:
            late: list[asyncio.Task[Run]] = []
            doomed: list[asyncio.Task[Run]] = []

            async def slow(work: StageWork, word: Any) -> None:
                if word.cut is not None and not late:
                    late.append(asyncio.create_task(ring.run([1, 7], 4)))
                    doomed[0].cancel()
                    await asyncio.sleep(0.05)
                await prepare(work, word)

            monkeypatch.setattr(StageWork, "prepare", slow)
            doomed.append(asyncio.create_task(ring.run([1, 8], 100)))
            async with asyncio.timeout(30):
                made = await ring.run(PROMPT, NEW)
                return [made, await late[0]], ring

    made, ring = asyncio.run(story())
    assert not any(b.outcome.aborted for b in ring.boundaries) and any(b.moves for b in ring.boundaries)
    monkeypatch.undo()
    unmoved, _ = run(files, make_cut(5, (2, 3)), (), [PROMPT, [1, 7]], (NEW, 4))
    assert all(same(a, b).bit_equal for a, b in zip(made, unmoved, strict=True))


def dropped(kv: BlockKV) -> None:
    """The oldest row is not there."""
    kv._start, kv._rows = kv._start + 1, kv._rows - 1


def later(kv: BlockKV) -> None:
    """Every row lies one position later than it should."""
    assert kv._k is not None
    rows = slice(kv._start, kv._start + kv._rows)
    kv._k[rows] = kv._k[rows].roll(1, 0)


@pytest.mark.parametrize("wound", [dropped, later])
def test_mutant_rows_show(
    wound: Callable[[BlockKV], None], tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ModelFiles(tiny("llama"))
    cut = make_cut(5, (2, 3))
    (unmoved,), _ = run(files, cut)
    pick = Arrivals.pick

    def wrong(held: Arrivals, block: int) -> dict[int, BlockKV]:
        found = pick(held, block)
        for kv in found.values():
            wound(kv)
        return found

    monkeypatch.setattr(Arrivals, "pick", wrong)
    (made,), ring = run(files, cut, [Shift(3, 1, -1)])
    assert any(b.moves for b in ring.boundaries)
    seen = same(made, unmoved)
    assert not seen.bit_equal and seen.delta > 1e-3


def test_mutant_order_of_blocks_shows(tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    files = ModelFiles(tiny("llama"))
    cut = make_cut(5, (2, 3))
    (unmoved,), _ = run(files, cut)
    put = stages.set_blocks
    monkeypatch.setattr(stages, "set_blocks", lambda a, b, c, blocks, e: put(a, b, c, blocks[::-1], e))
    (made,), _ = run(files, cut, [Shift(3, 1, -1)])
    assert not same(made, unmoved).bit_equal


def test_mutant_epoch_that_is_not_raised_is_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = StageWork.commit

    async def wrong(work: StageWork, cut: Cut | None) -> None:
        await commit(work, cut)
        if work._node == 1:
            for relay in work._relays:
                relay.epoch = 0

    monkeypatch.setattr(StageWork, "commit", wrong)
    with pytest.raises(SplitlmError, match=r"A frame of epoch 1 came.*Expected epoch 0"):
        run(ModelFiles(tiny("llama")), make_cut(5, (2, 3)), [Shift(3, 1, -1)])


def test_mutant_rows_since_the_background_that_are_not_sent_are_refused(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Mover._send

    async def wrong(mover: Mover, change: Any, *rest: Any) -> None:
        if not change.brought:
            await send(mover, change, *rest)

    monkeypatch.setattr(Mover, "_send", wrong)
    files, cut = ModelFiles(tiny("llama")), make_cut(5, (2, 3))
    (made,), ring = run(files, cut, [Shift(6, 1, -1)])
    assert ring.cut == cut and any("rows" in b.outcome.reason for b in ring.boundaries if b.outcome.aborted)
    monkeypatch.undo()
    (unmoved,), _ = run(files, cut)
    assert same(made, unmoved).bit_equal
    assert torch.isfinite(made.logits[0]).all()
