"""A trace loses nothing while the disk works, and stops nothing when it does not."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from splitlm.telemetry import sinks
from splitlm.telemetry.sinks import NullTrace, Trace, clear_run, read_trace, trace_path

from .test_record import FINAL, META, step


def test_everything_written_is_in_the_file_in_order_after_close(tmp_path: Path) -> None:
    trace = Trace(trace_path(tmp_path / "new", 0))
    given = [META, *(step(position=i) for i in range(3000)), FINAL]
    for record in given:
        trace.write(record)
    trace.close()
    assert trace.path.name == "trace-node0.jsonl"
    assert read_trace(trace.path) == given
    assert trace.dropped == 0


def test_records_reach_the_file_while_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "PERIOD_S", 0.001)
    written = threading.Event()
    append = Trace._append

    def spy(self: Trace, data: bytes) -> None:
        append(self, data)
        written.set()

    monkeypatch.setattr(Trace, "_append", spy)
    trace = Trace(tmp_path / "t.jsonl")
    trace.write(step())
    assert written.wait(10)
    assert read_trace(trace.path) == [step()]
    trace.close()


def test_several_threads_may_write(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    threads = [
        threading.Thread(target=lambda n=n: [trace.write(step(node=n, position=i)) for i in range(500)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    trace.close()
    got = read_trace(trace.path)
    for n in range(4):
        assert [r.position for r in got if r.node == n] == list(range(500))


def test_close_ends_the_thread_and_may_be_called_twice(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    trace.write(step())
    trace.close()
    trace.close()
    assert not trace._thread.is_alive()
    trace.write(step())
    assert trace.dropped == 1
    assert len(read_trace(trace.path)) == 1


def test_a_full_queue_drops_and_counts(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl", limit=0)
    for _ in range(3):
        trace.write(step())
    assert trace.dropped == 3
    trace.close()
    assert not trace.path.exists()


def test_an_older_trace_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("something older\n" * 1000)
    trace = Trace(path)
    trace.write(step())
    trace.close()
    assert read_trace(path) == [step()]


def test_a_folder_that_vanishes_costs_records_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "PERIOD_S", 60.0)
    trace = Trace(tmp_path / "gone" / "t.jsonl")
    with caplog.at_level(logging.WARNING):
        trace.write(step(position=0))
        trace._drain()
        shutil.rmtree(tmp_path / "gone")
        for i in (1, 2):
            trace.write(step(position=i))
            trace._drain()
        assert trace.dropped == 2
        (tmp_path / "gone").mkdir()
        trace.write(step(position=3))
        trace.close()
    assert trace.dropped == 2
    assert [r.position for r in read_trace(trace.path)] == [3]
    assert len(caplog.records) == 1
    assert str(trace.path) in caplog.text


def test_a_full_disk_leaves_whole_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "PERIOD_S", 60.0)
    trace = Trace(tmp_path / "t.jsonl")
    trace.write(step(position=0))
    trace._drain()
    write = os.write
    room = [10]

    def full(fd: int, data: memoryview) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        took = write(fd, data[: room[0]])
        room[0] = 0
        return took

    with caplog.at_level(logging.WARNING):
        with monkeypatch.context() as patch:
            patch.setattr(sinks.os, "write", full)
            trace.write(step(position=1))
            trace.write(step(position=2))
            trace._drain()
        trace.write(step(position=3))
        trace.close()
    assert trace.dropped == 2
    assert [r.position for r in read_trace(trace.path)] == [0, 3]
    assert "No space left" in caplog.text


def test_a_record_that_json_cannot_hold_is_lost_alone(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    for record in (step(position=0), step(position=object()), step(position={(): 1}), step(position=3)):
        trace.write(record)
    trace.close()
    assert [r.position for r in read_trace(trace.path)] == [0, 3]
    assert trace.dropped == 2


def test_close_gives_up_on_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "PERIOD_S", 60.0)
    monkeypatch.setattr(sinks, "CLOSE_S", -1.0)
    trace = Trace(tmp_path / "t.jsonl")
    for i in range(5):
        trace.write(step(position=i))
    trace._deadline = float("-inf")
    trace._drain()
    assert trace.dropped == 5
    trace._closing.set()
    trace._thread.join(10)
    assert not trace._thread.is_alive()


def test_no_trace_takes_everything_and_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trace = NullTrace()
    trace.write(step())
    trace.close()
    assert trace.dropped == 0
    assert list(tmp_path.iterdir()) == []


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    for i in range(3):
        trace.write(step(position=i))
    trace.close()
    whole = trace.path.read_bytes()
    trace.path.write_bytes(whole[:-20])
    assert [r.position for r in read_trace(trace.path)] == [0, 1]


@pytest.mark.parametrize("bad", [b"{", b'{"record":"other"}', b'{"record":"token","node":"x"}', b"\xff"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    trace = Trace(tmp_path / "t.jsonl")
    trace.write(step())
    trace.close()
    line = trace.path.read_bytes()
    trace.path.write_bytes(line + bad + b"\n" + line)
    with pytest.raises(ValueError, match=r"t\.jsonl:2:"):
        read_trace(trace.path)


def test_only_what_stages_left_is_cleared(tmp_path: Path) -> None:
    kept = ["run.json", "trace-node0.jsonl.bak", "my-trace-node0.jsonl", "notes.log", "trace-nodeX.jsonl"]
    for name in [*kept, "trace-node0.jsonl", "trace-node12.jsonl", "stage-3.log"]:
        (tmp_path / name).write_text("x")
    (tmp_path / "trace-node7.jsonl").mkdir()
    clear_run(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {*kept, "trace-node7.jsonl"}
    clear_run(tmp_path / "not there")


def test_a_disk_that_hangs_holds_up_neither_write_nor_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "PERIOD_S", 0.001)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.01)
    stuck, go_on = threading.Event(), threading.Event()

    def hang(self: Trace, data: bytes) -> None:
        stuck.set()
        go_on.wait(30)

    monkeypatch.setattr(Trace, "_append", hang)
    trace = Trace(tmp_path / "t.jsonl", limit=100)
    trace.write(step())
    assert stuck.wait(10)
    for _ in range(150):
        trace.write(step())
    assert trace.dropped == 50
    trace.close()
    assert trace._thread.is_alive()
    assert trace.dropped == 150
    go_on.set()
    trace._thread.join(10)
    assert not trace._thread.is_alive()
    assert trace.dropped == 150
