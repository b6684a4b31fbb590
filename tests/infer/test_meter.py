"""What a stage's records add up to, where sessions share steps."""

from __future__ import annotations

import pytest

from splitlm.infer.meter import Meter
from splitlm.infer.relay import Step
from splitlm.telemetry.record import Step as StepRecord
from splitlm.telemetry.sinks import NullTrace

MS = 1_000_000


def measured(meter: Meter, session: int, times: tuple[int, int, int, int], batch: int = 1) -> StepRecord:
    """Of a decode step; ``times`` are those of arrival, begin, end and sending (ms)."""
    arrived, begin, end, sent = (ms * MS for ms in times)
    step = Step(None, (), begin, end, session, 5, 1, batch=batch)
    return meter.measure(step, arrived_ns=arrived, sent_ns=sent, prefill=False, bytes_in=10, bytes_out=20)


def phases(record: StepRecord) -> tuple[float, float, float, float]:
    return record.recv_wait_ms, record.queue_ms, record.compute_ms, record.send_ms


def test_every_record_of_a_shared_step_has_the_whole_step_s_times_and_sums_have_them_once() -> None:
    meter = Meter(1, NullTrace())
    first = measured(meter, 1, (100, 101, 105, 106))
    assert phases(first) == (0, 1, 4, 1)
    # Free from 106 on; two frames came while it computed, one after that.
    shared = [measured(meter, s, (arrived, 110, 120, 123), 3) for s, arrived in ((1, 104), (2, 105), (3, 108))]
    assert [phases(r) for r in shared] == [(0, 4, 10, 3), (0, 4, 10, 3), (2, 2, 10, 3)]
    assert [r.batch for r in shared] == [3, 3, 3] and first.batch == 1
    after = measured(meter, 2, (130, 131, 132, 133))
    assert phases(after) == (7, 1, 1, 1), "it was free when the last of the three was sent"
    sums = meter.decode
    assert (sums.rows, sums.bytes_in, sums.bytes_out) == (5, 50, 100)
    assert sums.compute_ms == pytest.approx(4 + 10 + 1)
    assert sums.recv_wait_ms + sums.queue_ms == pytest.approx(1 + 4 + 8)
    assert sums.send_ms == pytest.approx(1 + 3 + 1)
    # End to end: nothing is missing and nothing counts twice.
    whole = sums.recv_wait_ms + sums.queue_ms + sums.compute_ms + sums.send_ms
    assert whole == pytest.approx(133 - 100)
    final = meter.final(0.0)
    assert final.compute_ms == pytest.approx(15) and final.tokens == 5


def test_two_shared_steps_of_the_same_sessions_are_two() -> None:
    meter = Meter(1, NullTrace())
    for begin in (10, 20):
        for session in (1, 2):
            measured(meter, session, (begin, begin, begin + 4, begin + 5), 2)
    assert meter.decode.compute_ms == pytest.approx(8)
    assert meter.decode.recv_wait_ms == pytest.approx(5)


def test_a_window_s_compute_is_that_of_a_token() -> None:
    meter = Meter(1, NullTrace())
    for session in range(4):
        measured(meter, session, (0, 0, 8, 8), 4)
    assert meter.window_ms() == pytest.approx(2)
    measured(meter, 1, (10, 10, 13, 13))
    assert meter.window_ms() == pytest.approx(3)
