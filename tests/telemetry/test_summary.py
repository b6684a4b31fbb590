"""Sums, shares, percentiles and hops, against numbers worked out by hand."""

from __future__ import annotations

import msgspec
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitlm.telemetry.record import Step
from splitlm.telemetry.summary import hop_times, lap_errors, percentile, spread, summarize

from .test_record import FINAL, META, SESSION, step

MS = 1_000_000


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_is_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(numpy.percentile(values, q)), rel=1e-9, abs=1e-6)


def test_percentile_known_values() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([10, 20], 99) == pytest.approx(19.9)
    assert percentile([7], 99) == 7


@pytest.mark.parametrize(("values", "q"), [([], 50), ([1.0], -1), ([1.0], 101)])
def test_percentile_refuses_what_has_no_answer(values: list[float], q: float) -> None:
    with pytest.raises(ValueError, match="percentile"):
        percentile(values, q)


def test_spread() -> None:
    assert spread([]) is None
    got = spread([1.0, 2.0, 6.0])
    assert got is not None
    assert (got.count, got.mean, got.p50) == (3, 3.0, 2.0)
    assert got.p99 == pytest.approx(5.92)


def ring(laps: int = 3, *, session: int = 1) -> list[Step]:
    """A ring of three: a prompt of 4 rows in two chunks, then laps of 10 ms.

    Node n computes for 1 + n ms; the hops 0→1, 1→2 and 2→0 take 0.5, 1.5 and 2 ms.
    """
    steps: list[Step] = []

    def lap(at: int, position: int, count: int, prefill: bool, **head: float) -> None:
        for node, begin in enumerate((0, 1.5, 5)):
            end = begin + 1 + node
            steps.append(
                step(
                    node=node,
                    session=session,
                    position=position,
                    count=count,
                    prefill=prefill,
                    start_ns=int(at * MS + begin * MS),
                    end_ns=int(at * MS + end * MS),
                    compute_ms=1.0 + node,
                    recv_wait_ms=8.0 - node,
                    queue_ms=0.75,
                    send_ms=0.25,
                    bytes_out=100 * (node + 1),
                    kv_bytes=position + count,
                    **(head if node == 0 else {}),
                )
            )

    lap(0, 0, 2, True)
    lap(50, 2, 2, True, ttft_ms=60.0)
    for i in range(laps):
        lap(60 + 10 * i, 4 + i, 1, False, tpot_ms=10.0)
    return steps


def test_hops_are_measured_between_computes_and_on_the_way_home() -> None:
    hops = hop_times(reversed(ring()))
    assert list(hops) == [(0, 1), (1, 2), (2, 0)]
    assert hops[0, 1] == [0.5] * 3
    assert hops[1, 2] == [1.5] * 3
    assert hops[2, 0] == [2.0] * 3  # the first token's, and two between laps; the last token's is not known


def test_hops_of_two_sessions_are_not_mixed() -> None:
    hops = hop_times(ring(session=1) + ring(session=2))
    assert hops[0, 1] == [0.5] * 6
    assert hops[2, 0] == [2.0] * 6


def test_a_stage_without_a_trace_gives_no_hop_across_it() -> None:
    hops = hop_times([s for s in ring() if s.node != 1])
    assert list(hops) == [(2, 0)]
    assert list(hop_times([s for s in ring() if s.node != 0])) == [(1, 2)]
    lost = hop_times([s for s in ring() if (s.node, s.position) != (2, 5)])
    assert list(lost) == [(0, 1), (1, 2), (2, 0)]
    assert [len(times) for times in lost.values()] == [3, 2, 2]


def test_a_private_ring_has_its_last_hop_to_the_head_and_none_within_it() -> None:
    """Node 0 holds segments 0 and 2; the token is sampled at home, so nothing travels between laps."""
    steps = []
    for p in (5, 6):
        at = p * 100 * MS
        steps += [
            step(node=0, segment=0, position=p, start_ns=at, end_ns=at + MS, recv_wait_ms=0.0),
            step(node=1, position=p, start_ns=at + 3 * MS, end_ns=at + 4 * MS),
            step(node=0, segment=2, position=p, start_ns=at + 7 * MS, end_ns=at + 8 * MS, tpot_ms=6.0),
        ]
    hops = hop_times(steps)
    assert hops == {(0, 1): [2.0, 2.0], (1, 0): [3.0, 3.0]}
    summary = summarize(steps)
    assert summary.tokens == 2
    node0 = (0 + 0.25 + 1.5 + 0.125) + (2.5 + 0.25 + 1.5 + 0.125)
    assert lap_errors(steps)[0] == pytest.approx(abs(node0 - 6) / 6)


def test_a_step_that_sessions_shared_counts_once() -> None:
    """Two sessions decode three laps in one step each, and one of them a fourth alone."""
    shared = [
        msgspec.structs.replace(s, session=session, batch=1 if s.prefill else 2) for session in (1, 2) for s in ring(3)
    ]
    alone = [s for s in ring(4) if s.position == 7]
    stages = summarize(shared + alone).stages
    plain = summarize(ring(4)).stages
    for found, true in zip(stages, plain, strict=True):
        assert found.steps == 7 and true.steps == 4
        assert (found.compute_ms, found.queue_ms) == pytest.approx((true.compute_ms, true.queue_ms))
        assert (found.recv_wait_ms, found.send_ms) == pytest.approx((true.recv_wait_ms, true.send_ms))
        assert found.compute_share == pytest.approx(true.compute_share)
        assert found.batch == pytest.approx(13 / 7) and true.batch == 1
        assert found.bytes_out == pytest.approx(true.bytes_out * 7 / 4)


def test_the_lap_account_is_exact_when_the_phases_fill_the_lap() -> None:
    assert lap_errors(ring()) == {0: 0.0, 1: 0.0, 2: 0.0}


def test_the_lap_account_shows_what_is_missing() -> None:
    short = [
        step(position=s.position, node=s.node, tpot_ms=s.tpot_ms, recv_wait_ms=0.0) for s in ring() if not s.prefill
    ]
    expected = (10 - 0.25 - 1.5 - 0.125) / 10
    assert lap_errors(short)[2] == pytest.approx(expected)


def test_a_summary_of_a_ring() -> None:
    got = summarize([META, *ring(), SESSION, FINAL])
    assert (got.sessions, got.tokens) == (1, 3)
    assert got.ttft_ms is not None and got.ttft_ms.p50 == 60.0
    assert got.tpot_ms is not None and (got.tpot_ms.p50, got.tpot_ms.p99) == (10.0, 10.0)
    assert got.tokens_per_s == pytest.approx(100.0)
    assert got.bytes_per_token == 600.0
    assert [s.node for s in got.stages] == [0, 1, 2]
    last = got.stages[2]
    assert (last.steps, last.compute_ms, last.recv_wait_ms, last.queue_ms, last.send_ms) == (3, 9.0, 18.0, 2.25, 0.75)
    assert (last.compute_share, last.recv_wait_share) == pytest.approx((0.3, 0.6))
    assert (last.queue_share, last.send_share) == pytest.approx((0.075, 0.025))
    assert (last.bytes_out, last.kv_bytes, last.lap_error) == (900, 7, 0.0)
    assert [(h.source, h.target, h.ms.p50) for h in got.hops] == [(0, 1, 0.5), (1, 2, 1.5), (2, 0, 2.0)]


def test_two_sessions_at_once_make_twice_the_tokens_per_second() -> None:
    assert summarize(ring(session=1) + ring(session=2)).tokens_per_s == pytest.approx(200.0)


def test_hops_are_left_out_where_clocks_differ() -> None:
    assert summarize(ring(), one_clock=False).hops == ()


def test_a_run_without_a_token() -> None:
    got = summarize([META])
    assert (got.sessions, got.tokens, got.ttft_ms, got.tpot_ms) == (0, 0, None, None)
    assert got.tokens_per_s is None and got.bytes_per_token is None
    prompt_only = summarize([s for s in ring() if s.prefill])
    assert (prompt_only.sessions, prompt_only.tokens) == (1, 0)
    assert prompt_only.stages[0].compute_share == 0.0
