"""Turns: first come, first served; chunks give way to tokens while the way out is backed up."""

from __future__ import annotations

import pytest

from splitlm.infer.schedule import Schedule, Turn, chunks, share


def drain(schedule: Schedule, *, backed_up: bool = False) -> list[Turn]:
    turns = []
    while (turn := schedule.next(backed_up=backed_up)) is not None:
        turns.append(turn)
    return turns


def test_turns_are_taken_in_the_order_in_which_they_came() -> None:
    schedule = Schedule()
    for number, prefill in ((3, True), (1, False), (2, True)):
        schedule.ready(number, prefill=prefill)
    assert len(schedule) == 3
    assert drain(schedule) == [Turn(3, True), Turn(1, False), Turn(2, True)]
    assert len(schedule) == 0


def test_a_backed_up_way_out_holds_chunks_but_no_tokens() -> None:
    schedule = Schedule()
    for number, prefill in ((1, True), (2, False), (3, True), (4, False)):
        schedule.ready(number, prefill=prefill)
    assert drain(schedule, backed_up=True) == [Turn(2, False), Turn(4, False)]
    assert drain(schedule) == [Turn(1, True), Turn(3, True)]


def test_a_session_that_ended_takes_no_turn_and_others_keep_theirs() -> None:
    schedule = Schedule()
    for number in (1, 2, 1, 3):
        schedule.ready(number, prefill=False)
    schedule.forget(1)
    schedule.forget(9)
    assert [turn.session for turn in drain(schedule)] == [2, 3]


def test_riders_are_the_oldest_tokens_that_wait_and_no_chunks() -> None:
    schedule = Schedule()
    for number, prefill in ((1, False), (2, True), (3, False), (4, False), (5, False)):
        schedule.ready(number, prefill=prefill)
    assert schedule.next(backed_up=False) == Turn(1, False)
    assert schedule.riders(0) == []
    assert schedule.riders(2) == [Turn(3, False), Turn(4, False)]
    assert drain(schedule) == [Turn(2, True), Turn(5, False)]
    assert schedule.riders(3) == []


@pytest.mark.parametrize(
    ("decoding", "segments", "width", "most"),
    [
        (8, 1, 32, 8),  # uncut: all
        (8, 1, 5, 5),
        (8, 3, 32, 3),  # a group for each segment
        (9, 3, 32, 3),
        (7, 3, 32, 3),
        (6, 3, 32, 2),
        (2, 3, 32, 1),  # fewer than segments: one each, so that they overlap
        (4, 2, 32, 2),
        (99, 2, 32, 32),
        (8, 3, 1, 1),  # exact
        (0, 3, 32, 1),
    ],
)
def test_an_equal_part_of_the_sessions_rides_for_each_segment(
    decoding: int, segments: int, width: int, most: int
) -> None:
    assert share(decoding, segments, width) == most


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_chunks_cover_a_prompt_once_and_in_order(length: int, size: int) -> None:
    parts = chunks(length, size)
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(length))
    assert all(end - begin == size for begin, end in parts[:-1])
    assert 0 < parts[-1][1] - parts[-1][0] <= size
