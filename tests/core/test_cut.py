"""Cuts: what is a cut, what is not, and which one is balanced."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitlm.core.cut import Cut, Move, Segment, all_boundaries, balanced_boundaries, diff, make_cut, shift
from splitlm.core.errors import CutError


def test_a_plain_cut_of_thirty_blocks_in_three() -> None:
    cut = make_cut(30, (6, 11))
    assert [(s.begin, s.end, s.embed, s.head) for s in cut.segments] == [
        (0, 6, True, False),
        (6, 11, False, False),
        (11, 30, False, True),
    ]
    assert cut.nodes == (0, 1, 2)
    assert (cut.stages, cut.private, cut.boundaries, cut.epoch) == (3, False, (6, 11), 0)
    assert [cut.next_node(n) for n in range(3)] == [1, 2, 0]
    assert cut.held_by(1) == (Segment(6, 11),)


def test_an_uncut_model_is_one_segment_whose_next_node_is_itself() -> None:
    cut = make_cut(5, ())
    assert cut.segments == (Segment(0, 5, embed=True, head=True),)
    assert (cut.stages, cut.private, cut.boundaries, cut.next_node(0)) == (1, False, (), 0)


def test_a_private_cut_brings_norm_head_and_tail_blocks_home() -> None:
    cut = make_cut(10, (2, 6), private=True, tail_blocks=1)
    assert [(s.begin, s.end, s.embed, s.head) for s in cut.segments] == [
        (0, 2, True, False),
        (2, 6, False, False),
        (6, 9, False, False),
        (9, 10, False, True),
    ]
    assert cut.nodes == (0, 1, 2, 0)
    assert (cut.stages, cut.private) == (3, True)
    assert cut.held_by(0) == (cut.segments[0], cut.segments[3])
    assert [cut.next_node(n) for n in range(3)] == [1, 2, 0]


def test_a_private_head_may_hold_no_block() -> None:
    cut = make_cut(4, (0,), private=True)
    assert [s.count for s in cut.segments] == [0, 4, 0]


@pytest.mark.parametrize(
    ("blocks", "boundaries", "private", "tail", "says"),
    [
        (5, (0,), False, 0, "Cut 0 is out of range.* Expected block indices: 1 to 4"),
        (2, (2,), False, 0, "Expected block indices: 1[.]"),
        (1, (1,), False, 0, "Expected no cuts: one stage"),
        (1, (1,), True, 1, "1 tail blocks.* Expected 0[.]"),
        (5, (5,), False, 0, "Cut 5 is out of range"),
        (5, (-1,), True, 0, "Cut -1 is out of range"),
        (5, (3, 3), False, 0, "do not increase"),
        (5, (3, 2), False, 0, "do not increase"),
        (5, (2,), False, 1, "not private"),
        (5, (), True, 0, "at least two stages"),
        (5, (4,), True, 1, "Cut 4 is out of range"),
        (5, (1,), True, 5, "5 tail blocks"),
        (5, (1,), True, -1, "-1 tail blocks"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(
    blocks: int, boundaries: tuple[int, ...], private: bool, tail: int, says: str
) -> None:
    with pytest.raises(CutError, match=says):
        make_cut(blocks, boundaries, private=private, tail_blocks=tail)


A, B = Segment(0, 2, embed=True), Segment(2, 4, head=True)


@pytest.mark.parametrize(
    ("blocks", "segments", "nodes", "says"),
    [
        (4, (), (), "one node for every segment"),
        (4, (A, B), (0,), "one node for every segment"),
        (4, (A, Segment(3, 4, head=True)), (0, 1), r"holds blocks \[3, 4\)"),
        (4, (A, Segment(1, 4, head=True)), (0, 1), r"holds blocks \[1, 4\)"),
        (4, (A, Segment(2, 1, head=True)), (0, 1), r"holds blocks \[2, 1\)"),
        (4, (Segment(0, 2), B), (0, 1), "embedding belongs to the first"),
        (4, (A, Segment(2, 4, embed=True, head=True)), (0, 1), "embedding belongs to the first"),
        (4, (A, Segment(2, 4)), (0, 1), "head to the last"),
        (4, (A, Segment(2, 2), B), (0, 1, 2), "Segment 1 holds nothing"),
        (5, (A, B), (0, 1), "all 5 blocks"),
        (4, (A, B), (1, 0), "out of order"),
        (4, (A, B), (0, 2), "out of order"),
        (4, (A, B), (0, -1), "out of order"),
    ],
)
def test_a_cut_that_no_model_can_have_is_refused(
    blocks: int, segments: tuple[Segment, ...], nodes: tuple[int, ...], says: str
) -> None:
    with pytest.raises(CutError, match=says):
        Cut(blocks, segments, nodes)


def test_nodes_are_numbered_in_the_order_of_their_first_segment() -> None:
    parts = (Segment(0, 1, embed=True), Segment(1, 2), Segment(2, 3, head=True))
    with pytest.raises(CutError, match="out of order"):
        Cut(3, parts, (0, 2, 1))


@pytest.mark.parametrize("nodes", [(0, 0), (0, 0, 1), (0, 1, 1), (0, 1, 0, 1), (0, 1, 0, 2)])
def test_a_node_that_comes_back_anywhere_but_at_the_end_is_refused(nodes: tuple[int, ...]) -> None:
    """Only the head may hold two segments, the first and the last: ``next_node`` walks the nodes once per lap."""
    count = len(nodes)
    parts = tuple(Segment(i, i + 1, embed=i == 0, head=i == count - 1) for i in range(count))
    with pytest.raises(CutError, match="twice"):
        Cut(count, parts, nodes)


def test_a_cut_comes_back_from_json_and_a_bad_one_does_not() -> None:
    cut = make_cut(10, (2, 6), private=True)
    assert msgspec.json.decode(msgspec.json.encode(cut), type=Cut) == cut
    bad = msgspec.json.encode(cut).replace(b'"blocks":10', b'"blocks":11')
    with pytest.raises((CutError, msgspec.ValidationError), match="blocks"):
        msgspec.json.decode(bad, type=Cut)


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        (Segment(0, 6, embed=True), "embedding + blocks 0–5"),
        (Segment(6, 11), "blocks 6–10"),
        (Segment(11, 30, head=True), "blocks 11–29 + head"),
        (Segment(4, 4, head=True), "head"),
        (Segment(3, 4), "block 3"),
        (Segment(4, 4), "nothing"),
    ],
)
def test_a_segment_in_words(segment: Segment, text: str) -> None:
    assert str(segment) == text
    assert list(segment.blocks) == list(range(segment.begin, segment.end))


def slowest(blocks: int, edges: tuple[int, ...], head_cost: float, private: bool, tail: int) -> float:
    ends = [0, *edges, blocks - tail]
    costs = [float(b - a) for a, b in itertools.pairwise(ends)]
    costs[0 if private else -1] += head_cost + tail
    return max(costs)


@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.7, 20.0]),
    st.booleans(),
    st.integers(0, 2),
)
def test_balanced_boundaries_are_as_good_as_the_best_of_all(
    blocks: int, stages: int, head_cost: float, private: bool, tail: int
) -> None:
    tail = min(tail, blocks - 1) if private else 0
    free = blocks - tail
    if stages > free:
        with pytest.raises(CutError, match="at most"):
            balanced_boundaries(blocks, stages, head_cost=head_cost, private=private, tail_blocks=tail)
        return
    got = balanced_boundaries(blocks, stages, head_cost=head_cost, private=private, tail_blocks=tail)
    assert got in all_boundaries(free, stages)
    best = min(slowest(blocks, edges, head_cost, private, tail) for edges in all_boundaries(free, stages))
    assert slowest(blocks, got, head_cost, private, tail) == pytest.approx(best)


def test_balance_of_equal_blocks_and_of_a_heavy_head() -> None:
    assert balanced_boundaries(30, 3) == (10, 20)
    assert balanced_boundaries(30, 1) == ()
    edges = balanced_boundaries(30, 3, head_cost=6.0)
    assert 30 - edges[-1] == 6


@pytest.mark.parametrize("stages", [0, -1])
def test_fewer_than_one_stage_is_refused(stages: int) -> None:
    with pytest.raises(CutError, match="at least 1"):
        balanced_boundaries(5, stages)


def test_all_boundaries_counts() -> None:
    assert all_boundaries(4, 3) == [(1, 2), (1, 3), (2, 3)]
    assert all_boundaries(4, 1) == [()]


# Moves between cuts

PLAIN = make_cut(12, (4, 8))
PRIVATE = make_cut(12, (4, 8), private=True, tail_blocks=2)


@pytest.mark.parametrize(
    ("boundary", "k", "edges", "moves"),
    [
        (1, 1, (5, 8), [(4, 1, 0)]),
        (1, -1, (3, 8), [(3, 0, 1)]),
        (2, 2, (4, 10), [(8, 2, 1), (9, 2, 1)]),
        (2, -3, (4, 5), [(5, 1, 2), (6, 1, 2), (7, 1, 2)]),
        (1, 3, (7, 8), [(4, 1, 0), (5, 1, 0), (6, 1, 0)]),
        (1, -3, (1, 8), [(1, 0, 1), (2, 0, 1), (3, 0, 1)]),
    ],
)
def test_a_shift_pulls_blocks_back_or_pushes_them_forward(
    boundary: int, k: int, edges: tuple[int, ...], moves: list[tuple[int, int, int]]
) -> None:
    new = shift(PLAIN, boundary, k)
    assert (new.boundaries, new.epoch, new.nodes) == (edges, 1, PLAIN.nodes)
    assert diff(PLAIN, new) == tuple(Move(*move) for move in moves)
    assert shift(new, boundary, -k) == msgspec.structs.replace(PLAIN, epoch=2)
    assert diff(PLAIN, PLAIN) == ()


@pytest.mark.parametrize(
    ("cut", "boundary", "k", "says"),
    [
        (PLAIN, 0, 1, r"--shift-boundary: Boundary 0 .*1 to 2"),
        (PLAIN, 3, 1, r"--shift-boundary: Boundary 3 .*1 to 2"),
        (PLAIN, 1, 0, r"--shift-k: .*moves nothing"),
        (PLAIN, 1, 4, r"--shift-k: .*Expected -3 to -1 or 1 to 3, so"),
        (PLAIN, 1, -4, r"--shift-k: .*Expected -3 to -1 or 1 to 3, so"),
        (PLAIN, 2, 4, r"--shift-k: .*Expected -3 to -1 or 1 to 3, so"),
        (make_cut(4, (1,)), 1, -1, r"--shift-k: .*Expected 1 to 2, so"),
        (make_cut(3, (2,)), 1, 1, r"--shift-k: .*Expected -1, so"),
        (make_cut(2, (1,)), 1, 1, r"--shift-k: .*Expected another boundary: neither stage"),
        (make_cut(2, (1,)), 2, 1, r"--shift-boundary: .*Expected 1: the ends"),
        (PRIVATE, 3, -1, r"--shift-boundary: Boundary 3"),
        (PRIVATE, 2, 2, r"--shift-k: .*Expected -3 to -1 or 1, so"),
        (PRIVATE, 1, -5, r"--shift-k: .*Expected -4 to -1 or 1 to 3, so"),
        (make_cut(5, ()), 1, 1, "at least two stages"),
    ],
)
def test_a_shift_that_no_cut_allows_is_refused(cut: Cut, boundary: int, k: int, says: str) -> None:
    with pytest.raises(CutError, match=says):
        shift(cut, boundary, k)


def test_the_head_of_a_private_ring_may_give_all_its_blocks_away_and_take_them_back() -> None:
    empty = shift(PRIVATE, 1, -4)
    assert [part.count for part in empty.segments] == [0, 8, 2, 2]
    assert diff(PRIVATE, empty) == tuple(Move(block, 0, 1) for block in range(4))
    assert shift(empty, 1, 4).segments == PRIVATE.segments


def test_what_is_no_step_from_one_cut_to_another_is_refused() -> None:
    for new, says in [
        (make_cut(12, (4,)), "same model and the same nodes"),
        (make_cut(13, (4, 8)), "same model and the same nodes"),
        (make_cut(12, (9, 10)), "Block 8 would move from node 2 to node 0"),
    ]:
        with pytest.raises(CutError, match=says):
            diff(PLAIN, new)
    with pytest.raises(CutError, match="final blocks of a private cut stay"):
        diff(PRIVATE, make_cut(12, (4, 8), private=True, tail_blocks=1))
    hollow = Cut(4, (Segment(0, 0, embed=True), Segment(0, 4, head=True)), (0, 1))
    with pytest.raises(CutError, match="Stage 0 would be left without a block"):
        diff(make_cut(4, (2,)), hollow)


@given(st.data())
def test_any_shift_moves_just_its_blocks_between_two_neighbours(data: st.DataObject) -> None:
    edges = data.draw(st.sets(st.integers(1, 19), min_size=1, max_size=4))
    cut = make_cut(20, sorted(edges))
    boundary, k = data.draw(st.integers(1, len(edges))), data.draw(st.integers(-20, 20))
    try:
        new = shift(cut, boundary, k)
    except CutError:
        return
    moves = diff(cut, new)
    ends = {(boundary, boundary - 1) if k > 0 else (boundary - 1, boundary)}
    assert {(m.source, m.target) for m in moves} == ends and len(moves) == abs(k)
    assert all(part.count >= 1 for part in new.segments)
    assert [m.block for m in diff(new, cut)] == [m.block for m in moves]
