"""What a neighbour sends is believed only where it is this model's, whole and in order."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitlm.core.errors import ProtocolError
from splitlm.migrate.arrivals import GIVEN_UP, Arrivals, KVShape
from splitlm.model import payload
from splitlm.model.cache import BlockKV
from splitlm.wire.frame import Close, Frame, Mark, Rows

HEADS, WIDTH, WINDOW, CONTEXT = 2, 4, 8, 100
SHAPE = KVShape((None, WINDOW), HEADS, WIDTH, torch.float32, CONTEXT)


def arrivals() -> Arrivals:
    return Arrivals(SHAPE, "node 7")


def made(first: int, count: int, block: int = 0, heads: int = HEADS, width: int = WIDTH) -> torch.Tensor:
    """Rows that tell their position and block."""
    return (torch.arange(first, first + count).view(-1, 1, 1) + 1000.0 * block).expand(count, heads, width).contiguous()


def rows(
    first: int,
    count: int,
    *,
    block: int = 0,
    session: int = 1,
    change: int = 1,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
) -> Frame:
    key = made(first, count, block) if key is None else key
    value = -made(first, count, block) if value is None else value
    (a, x), (b, y) = payload.dump(key), payload.dump(value)
    return Frame(Rows(change=change, session=session, block=block, position=first, tensors=(a, b)), (x, y))


def mark(sessions: Mapping[int, int], seq: int = 1, change: int = 1) -> Frame:
    return Frame(Mark(change=change, seq=seq, sessions=tuple(sessions.items())))


def complete(held: Arrivals, sessions: Mapping[int, int], blocks: tuple[int, ...] = (0,), seq: int = 1) -> object:
    async def wait() -> object:
        async with asyncio.timeout(5):
            return await held.complete(seq, blocks, sessions)

    return asyncio.run(wait())


def test_whole_rows_are_installed_with_their_exact_bytes() -> None:
    held = arrivals()
    for frame in (rows(0, 3), rows(3, 2), rows(0, 5, block=1), mark({1: 5})):
        held.take(frame)
    assert complete(held, {1: 5}, (0, 1)) == (10 * SHAPE.row_bytes, 10)
    k, v, first = held.pick(0)[1].take(0, 100)
    assert first == 0 and torch.equal(k, made(0, 5)) and torch.equal(v, -made(0, 5))
    assert held.pick(0) == {} and set(held.pick(1)) == {1} and held.nbytes == 0


def test_a_sliding_block_keeps_its_window_and_its_true_length() -> None:
    held = arrivals()
    for frame in (rows(0, 20, block=1), rows(30, 10, block=1), mark({1: 40})):  # rows 20 to 29 had left the window
        held.take(frame)
    assert complete(held, {1: 40}, (1,)) == ((WINDOW - 1) * SHAPE.row_bytes, WINDOW - 1)
    kv = held.pick(1)[1]
    assert (kv.seen, kv.rows) == (40, WINDOW - 1)
    assert torch.equal(kv.take(0, 100)[0], made(33, 7, 1))


BAD = {
    "heads": rows(0, 2, key=made(0, 2, heads=3), value=made(0, 2, heads=3)),
    "width": rows(0, 2, key=made(0, 2, width=5), value=made(0, 2, width=5)),
    "values of another shape": rows(0, 2, value=made(0, 2, width=5)),
    "fewer values": rows(0, 2, value=made(0, 1)),
    "dtype": rows(0, 2, key=made(0, 2).half(), value=made(0, 2).half()),
    "dimensions": rows(0, 2, key=made(0, 2)[0], value=made(0, 2)[0]),
    "no rows": rows(0, 0),
    "no such block": rows(0, 2, block=2),
    "block below 0": rows(0, 2, block=-1),
    "gap": rows(3, 2),
    "position below 0": rows(-1, 2),
    "beyond the context": rows(CONTEXT - 1, 2, block=1),
    "another kind": Frame(Close(session=1)),
    "one tensor": Frame(Rows(change=1, session=1, block=0, position=0)),
}


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD.keys())
def test_rows_that_are_not_this_models_are_refused(frame: Frame) -> None:
    with pytest.raises(ProtocolError, match=r"node 7|position 0"):
        arrivals().take(frame)


@pytest.mark.parametrize("first", [0, 4, 6])
def test_rows_that_overlap_or_leave_a_gap_are_refused(first: int) -> None:
    held = arrivals()
    held.take(rows(0, 5))
    with pytest.raises(ProtocolError, match="position 5"):
        held.take(rows(first, 2))


def test_rows_after_their_mark_and_frames_of_an_older_change_are_refused() -> None:
    held = arrivals()
    held.take(mark({1: 5}, change=2))
    with pytest.raises(ProtocolError, match="after the mark"):
        held.take(rows(0, 5, change=2))
    with pytest.raises(ProtocolError, match="change 1 came"):
        held.take(rows(0, 5, change=1))


@pytest.mark.parametrize(
    ("came", "marked", "ours", "words"),
    [
        ([rows(0, 4)], {1: 5}, {1: 5}, "4 rows"),
        ([rows(0, 6)], {1: 5}, {1: 5}, "6 rows"),
        ([], {1: 5}, {1: 5}, "0 rows"),
        ([rows(0, 5)], {1: 5}, {1: 6}, "sessions are"),
        ([rows(0, 5)], {1: 5, 2: 1}, {1: 5}, "sessions are"),
        ([rows(0, 5)], {1: 5}, {1: 5, 2: 1}, "sessions are"),
    ],
)
def test_what_is_missing_or_too_much_is_named(
    came: list[Frame], marked: dict[int, int], ours: dict[int, int], words: str
) -> None:
    held = arrivals()
    for frame in [*came, mark(marked)]:
        held.take(frame)
    with pytest.raises(ProtocolError, match=words):
        complete(held, ours)


def test_a_mark_of_another_barrier_is_not_the_one_waited_for() -> None:
    async def story() -> None:
        held = arrivals()
        held.take(rows(0, 5))
        held.take(mark({1: 5}, seq=1))
        waiting = asyncio.create_task(held.complete(2, (0,), {1: 6}))
        await asyncio.sleep(0)
        assert not waiting.done()
        held.take(rows(0, 6, change=2))
        held.take(mark({1: 6}, seq=2, change=2))
        assert await waiting == (6 * SHAPE.row_bytes, 6)

    asyncio.run(story())


def test_a_change_that_was_given_up_leaves_nothing() -> None:
    held = arrivals()
    held.take(rows(0, 5))
    held.take(mark({}, seq=GIVEN_UP))
    assert held.nbytes == 0 and held.pick(0) == {}
    held.take(rows(0, 2, change=2))
    assert held.nbytes == 2 * SHAPE.row_bytes


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_split_into_frames_gives_the_same_rows(data: st.DataObject) -> None:
    """Sessions and blocks in any order, a sliding window's dropped rows left out anywhere."""
    lengths = data.draw(st.dictionaries(st.integers(1, 4), st.integers(1, 40), min_size=1, max_size=3))
    held, whole = arrivals(), {}
    todo = []
    for session, seen in lengths.items():
        for block in (0, 1):
            whole[block, session] = BlockKV(SHAPE.windows[block])
            whole[block, session].extend(made(0, seen, block), -made(0, seen, block), 0)
            at = 0
            while at < seen:
                count = data.draw(st.integers(1, seen - at))
                todo.append((block, session, at, count))
                at += count
                if block == 1 and at < seen - (WINDOW - 1):
                    at = data.draw(st.integers(at, seen - (WINDOW - 1)))
    order = data.draw(st.permutations(range(len(todo))))
    lanes = {pair: [t for t in todo if t[:2] == pair] for pair in whole}
    for i in order:  # the order of lanes is free, that within a lane is not
        block, session, at, count = lanes[todo[i][:2]].pop(0)
        held.take(rows(at, count, block=block, session=session))
    held.take(mark(lengths))
    due = sum(seen + min(seen, WINDOW - 1) for seen in lengths.values())
    assert complete(held, lengths, (0, 1)) == (due * SHAPE.row_bytes, due)
    for block, session in whole:
        got = held.pick(block) if session == min(lengths) else {}
        for number, came in got.items():
            k, v, first = came.take(0, 1000)
            mk, mv, mfirst = whole[block, number].take(0, 1000)
            assert first == mfirst and torch.equal(k, mk) and torch.equal(v, mv)
