"""What the laps of a session say of its barriers, from records written by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from splitlm.bench import laps
from splitlm.bench.auto import ideal
from splitlm.bench.laps import Lap
from splitlm.bench.migrate import HELD, TOKENS, WINDOWS, counted, shifts
from splitlm.bench.windows import WINDOW
from splitlm.core.errors import SplitlmError
from splitlm.telemetry.record import Migration, Record, Step, Window
from splitlm.telemetry.summary import lap_errors, single_lap_errors, summarize

PROMPT = 5


def step(number: int, position: int, ms: float | None, epoch: int = 0, node: int = 0) -> Step:
    return Step(
        node=node,
        session=number,
        position=position,
        count=1,
        epoch=epoch,
        prefill=ms is None,
        compute_ms=1.0,
        recv_wait_ms=0.0,
        queue_ms=0.0,
        send_ms=0.0,
        bytes_in=0,
        bytes_out=0,
        kv_bytes=0,
        rss_mb=0.0,
        start_ns=0,
        end_ns=0,
        tpot_ms=ms,
    )


def session(number: int, times: list[float], epochs: list[int]) -> list[Record]:
    """A prompt, then a lap for each time; another node's steps between them."""
    found: list[Record] = [step(number, 0, None)]
    for i, (ms, epoch) in enumerate(zip(times, epochs, strict=True)):
        found += [step(number, PROMPT + i, ms, epoch), step(number, PROMPT + i, None, epoch, node=1)]
    return found


def side(
    node: int, role: str, epoch: int, *, construct: float | None = None, read: float | None = None, pack: float = 0.0
) -> Migration:
    return Migration(
        node=node,
        peer=1 - node,
        role=role,
        epoch=epoch,
        blocks=[3],
        kv_bytes=100,
        kv_tokens=1,
        kv_ms=0.5,
        background_bytes=60,
        commit_ms=0.1,
        weight_construct_ms=construct,
        weight_read_ms=read,
        pack_ms=pack,
    )


#                 0   1   2   3   4   5   6   7   8   9  10  11  12
TIMES = [10.0, 10, 12, 10, 11, 15, 16, 10, 19, 10, 10, 13, 10]
"""Windows of 3: barriers in laps 2, 5, 8 and 11; the one of lap 8 moves a block, which is staged from lap 5 on."""
EPOCHS = [4] * 8 + [5] * 5


def test_laps_are_sorted_by_what_they_contain() -> None:
    """The barrier before a move stands apart: what is staged behind it is in its lap too."""
    made = laps.generation([Lap(ms, epoch) for ms, epoch in zip(TIMES, EPOCHS, strict=True)], 3)
    assert made.ordinary == 10.0
    assert made.noops == (12, 13)
    assert made.moves == {5: 19}
    assert made.staging == {5: (15, 16, 10)}


def test_a_move_at_the_first_barrier_has_no_barrier_before_it() -> None:
    """Its staging is not the end of the session."""
    made = laps.generation([Lap(ms, ms > 11) for ms in [10.0, 10, 19, 20, 20, 22, 20]], 3)
    assert made.moves == {1: 19}
    assert made.staging == {1: (10, 10)}
    assert made.noops == (22,)


def test_a_move_is_told_over_the_noop_barriers_of_its_session() -> None:
    """Extra over a barrier, gap over a lap; staging counts the laps that it took and one more."""
    records: list[Record] = [
        *session(2, TIMES, EPOCHS),
        side(0, "receiver", 5, construct=2.0, read=5.0),
        side(1, "donor", 5, pack=1.0),
        side(1, "receiver", 6),
    ]
    (move,) = laps.moves(records, 3)
    assert move.pulled and [s.node for s in move.sides] == [0, 1]
    assert move.extra_ms == 19 - 12.5
    assert move.gap_ms == 9
    assert move.lost_ms == (15 + 16) - (12.5 + 10)
    assert move.staging == pytest.approx((15 + 16) / (12.5 + 10))


def test_long_staging_counts_more_laps() -> None:
    """But none behind the move itself."""
    records: list[Record] = [*session(2, TIMES, EPOCHS), side(1, "receiver", 5, read=1000.0)]
    (move,) = laps.moves(records, 3)
    assert not move.pulled
    assert move.lost_ms == (15 + 16 + 10) - (12.5 + 10 + 10)


def test_noop_barriers_are_pooled_over_sessions() -> None:
    """Each as the difference to its own session's laps."""
    slow = [20.0, 20, 23, 20, 20, 23, 20, 20, 23]
    records: list[Record] = [*session(1, slow, [4] * 9), *session(2, TIMES, EPOCHS), side(0, "receiver", 5)]
    (move,) = laps.moves(records, 3)
    assert (move.gap_ms, move.extra_ms) == (9, 6)
    assert laps.moves(session(2, TIMES[:9], EPOCHS[:9]), 9) == []


def test_sessions_are_kept_apart_and_short_ones_left_out() -> None:
    """In the order of their numbers, whatever that of the records."""
    short = session(3, [10.0] * 5, [5] * 5)
    records = [*session(4, [20.0, 20, 22] * 2, [5] * 6), *short, *session(2, TIMES, EPOCHS)]
    assert [made.ordinary for made in laps.generations(records, 3)] == [10, 20]


def test_the_protocol_alone_is_of_noop_barriers() -> None:
    """The head's number holds the drain; moves and aborts say nothing of the protocol."""
    noop = Window(node=2, seq=1, epoch=0, decision="noop", barrier_ms=0.7, aborted=False)
    change = msgspec.structs.replace
    records = [
        noop,
        change(noop, node=0, barrier_ms=3.0, drain_ms=2.0),
        change(noop, decision="forced-shift", barrier_ms=9.0),
        change(noop, aborted=True, barrier_ms=9.0),
    ]
    assert laps.protocol(records) == ([0.7], [1.0])
    assert laps.protocol(records, "forced-shift") == ([9.0], [])


def test_every_generation_of_the_bench_moves_one_block_at_113_tokens() -> None:
    """A shift per generation at its third boundary, there and back; the last boundary of a generation is a barrier."""
    assert HELD == 113
    assert (TOKENS - 1) // WINDOW == WINDOWS
    asked = shifts(2)
    assert [(at // WINDOW) % WINDOWS for at, _, _ in asked] == [3] * 4
    assert [at // WINDOW // WINDOWS for at, _, _ in asked] == [0, 1, 2, 3]
    assert [(boundary, k) for _, boundary, k in asked] == [(1, 1), (1, -1)] * 2


def test_the_first_turn_does_not_count() -> None:
    """And moves in one direction alone are no figure."""
    pull = laps.Move(True, 1.0, 2.0, 10.0, 1.0, 0.0, ())
    push = laps.Move(False, 1.0, 2.0, 10.0, 1.0, 0.0, ())
    assert counted([pull, push, push, pull], Path("x")) == [push, pull]
    for few in ([pull, push], [pull, push, pull], []):
        with pytest.raises(SplitlmError, match="both directions"):
            counted(few, Path("x"))


def test_the_best_cut_of_a_slow_stage() -> None:
    """Of 12 blocks, the stage of half the speed keeps 2 of 4 and its neighbours take one each."""
    assert ideal([1.0, 2.0, 1.0]) == 8 / 5
    assert ideal([1.0, 1.0, 1.0]) == 1


def test_a_wait_that_counts_with_its_neighbour_is_off_in_single_laps_and_not_in_their_sum() -> None:
    """Laps of 10, 30 and 20 ms, of which 1 ms is compute; node 1 has each wait a lap late, and node 2 misses one."""
    waits = {0: (9.0, 29.0, 19.0), 1: (19.0, 9.0, 29.0), 2: (9.0, 29.0, 0.0)}
    change = msgspec.structs.replace
    steps = [
        change(step(1, PROMPT + i, lap if node == 0 else None, node=node), prefill=False, recv_wait_ms=waits[node][i])
        for i, lap in enumerate((10.0, 30.0, 20.0))
        for node in waits
    ]
    assert lap_errors(steps) == {0: 0, 1: 0, 2: pytest.approx(19 / 60)}
    assert single_lap_errors(steps) == {
        0: [0, 0, 0],
        1: pytest.approx([10 / 10, 20 / 30, 10 / 20]),
        2: pytest.approx([0, 0, 19 / 20]),
    }
    late = summarize(steps).stages[1]
    assert (late.lap_error, late.lap_error_p50) == (0, pytest.approx(2 / 3))
    assert late.lap_error_p99 == pytest.approx(2 / 3 + 0.98 / 3)
    assert summarize([change(one, tpot_ms=None) for one in steps]).stages[1].lap_error_p50 is None
