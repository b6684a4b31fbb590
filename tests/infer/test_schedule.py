"""Turns: first come, first served; chunks give way to tokens while the way out is backed up."""

from __future__ import annotations

import pytest

from splitlm.infer.schedule import Schedule, Turn, chunks


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


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_chunks_cover_a_prompt_once_and_in_order(length: int, size: int) -> None:
    parts = chunks(length, size)
    assert [i for begin, end in parts for i in range(begin, end)] == list(range(length))
    assert all(end - begin == size for begin, end in parts[:-1])
    assert 0 < parts[-1][1] - parts[-1][0] <= size
