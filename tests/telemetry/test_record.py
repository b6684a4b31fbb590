"""Records: one line each, named by its tag, nothing written that is not known."""

from __future__ import annotations

import json

import msgspec
import pytest

from splitlm.telemetry.record import Final, Record, Session, StageMeta, Step


def step(**changes: object) -> Step:
    given = {
        "node": 1,
        "session": 7,
        "position": 12,
        "count": 1,
        "epoch": 3,
        "prefill": False,
        "compute_ms": 1.5,
        "recv_wait_ms": 2.5,
        "queue_ms": 0.25,
        "send_ms": 0.125,
        "bytes_in": 2400,
        "bytes_out": 2401,
        "kv_bytes": 4096,
        "rss_mb": 333.0,
        "start_ns": 1000,
        "end_ns": 2000,
    }
    return Step(**{**given, **changes})


def test_a_step_is_one_json_line_with_its_tag() -> None:
    line = msgspec.json.encode(step())
    data = json.loads(line)
    assert data["record"] == "token"
    assert b"\n" not in line
    assert data["position"] == 12 and data["bytes_out"] == 2401


def test_what_a_stage_does_not_know_is_left_out() -> None:
    data = json.loads(msgspec.json.encode(step()))
    assert not {"tpot_ms", "ttft_ms", "segment", "batch"} & data.keys()
    data = json.loads(msgspec.json.encode(step(tpot_ms=4.5, segment=0, batch=3)))
    assert data["tpot_ms"] == 4.5 and data["segment"] == 0 and data["batch"] == 3


@pytest.mark.parametrize("prefill", [True, False])
def test_a_prefill_step_and_a_decode_step_are_told_apart_in_the_line(prefill: bool) -> None:
    assert json.loads(msgspec.json.encode(step(prefill=prefill)))["prefill"] is prefill


def test_records_are_frozen() -> None:
    with pytest.raises(AttributeError):
        step().position = 3  # type: ignore[misc]


META = StageMeta(
    node=0,
    name="host:1",
    segments="embedding + blocks 0–1",
    blocks=[0, 1],
    parameters=10,
    resident_bytes=40,
    dtype="float32",
    device="cpu",
    threads=1,
    compute="exact",
    construct_ms=1.0,
    read_ms=2.0,
    assign_ms=3.0,
    read_kind="pread",
    import_rss_mb=300.0,
    versions={"torch": "2"},
)
FINAL = Final(
    node=0,
    tokens=3,
    peak_rss_mb=400.0,
    import_rss_mb=300.0,
    compute_ms=1.0,
    recv_wait_ms=1.0,
    queue_ms=1.0,
    send_ms=1.0,
    bytes_in=1,
    bytes_out=1,
)
SESSION = Session(session=1, prompt_tokens=2, new_tokens=3, finish="eos", ttft_ms=5.0)


@pytest.mark.parametrize(
    ("record", "tag"), [(step(), "token"), (META, "stage_meta"), (FINAL, "stage_end"), (SESSION, "session")]
)
def test_every_record_comes_back_as_itself(record: Record, tag: str) -> None:
    line = msgspec.json.encode(record)
    assert json.loads(line)["record"] == tag
    assert msgspec.json.decode(line, type=Record) == record
