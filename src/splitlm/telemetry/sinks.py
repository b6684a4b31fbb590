"""Where records go: a JSONL file per stage, and for others CSV and Prometheus text.

A record is written once per token on the way between two frames. So ``Trace.write`` only appends to a bounded queue
(under a microsecond); a thread encodes and writes four times a second. What the disk does not take is lost and counted:
telemetry never stops a run.
"""

from __future__ import annotations

import csv
import io
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from splitlm.telemetry.record import Record
from splitlm.telemetry.summary import Summary

PERIOD_S = 0.25
QUEUE_RECORDS = 65_536
BATCH_RECORDS = 1024
CLOSE_S = 2.0

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Something that takes records."""

    @property
    def dropped(self) -> int:
        """Records that were lost."""
        ...

    def write(self, record: Record) -> None:
        """Take one record; never raises, never blocks."""
        ...

    def close(self) -> None:
        """Write what was taken, within a bounded time; safe to call twice."""
        ...


class NullTrace:
    """Takes records and forgets them (``--no-trace``)."""

    dropped = 0

    def write(self, record: Record) -> None:
        """Forget the record."""

    def close(self) -> None:
        """Nothing to do."""


def trace_path(folder: Path, node: int) -> Path:
    """The trace file of one stage in a run's folder."""
    return folder / f"trace-node{node}.jsonl"


class Trace:
    """Writes records to one JSONL file, from a thread of its own.

    An older file of the same name is replaced when the first record is written. ``write`` may be called from any
    thread. Call ``close`` at the end: the last quarter of a second is in the queue until then.
    """

    def __init__(self, path: Path, *, limit: int = QUEUE_RECORDS) -> None:
        self.path = path
        self._limit = limit
        self._queue: deque[Record] = deque()
        self._encoder = msgspec.json.Encoder()
        self._started = False
        self._warned = False
        self._refused = 0
        self._lost = 0
        self._refusing = threading.Lock()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"trace {path.name}", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """Records lost so far: the queue was full, the trace closed, or the disk did not take them."""
        return self._refused + self._lost

    def write(self, record: Record) -> None:
        """Take one record; never raises, never blocks."""
        if len(self._queue) < self._limit and not self._closing.is_set():
            self._queue.append(record)
            return
        with self._refusing:
            self._refused += 1

    def close(self) -> None:
        """Write what is queued, give up after two seconds, end the thread; safe to call twice."""
        if self._closing.is_set():
            return
        self._deadline = time.monotonic() + CLOSE_S
        self._closing.set()
        self._thread.join(CLOSE_S + PERIOD_S)
        if self._thread.is_alive():  # stuck inside one call of the operating system
            queue, self._queue = self._queue, deque()
            self._lose(len(queue), "the disk does not answer")

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_S):
            self._drain()
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            if time.monotonic() > self._deadline:
                self._lose(len(self._queue), "the disk is too slow")
                return
            queue = self._queue
            batch = [queue.popleft() for _ in range(min(len(queue), BATCH_RECORDS))]
            lines = self._encode(batch)
            try:
                self._append(b"".join(lines))
            except OSError as error:
                self._lose(len(lines), str(error))

    def _encode(self, batch: Sequence[Record]) -> list[bytes]:
        lines = []
        for record in batch:
            try:
                lines.append(self._encoder.encode(record) + b"\n")
            except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
                self._lose(1, f"a record that JSON cannot hold: {error}")
        return lines

    def _append(self, data: bytes) -> None:
        """Append whole lines, or nothing. Opened anew each time: a folder that vanished is noticed, and may return."""
        if not self._started:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if self._started else os.O_TRUNC)
        fd = os.open(self.path, flags, 0o644)
        try:
            size = os.fstat(fd).st_size
            rest = memoryview(data)
            try:
                while rest:
                    rest = rest[os.write(fd, rest) :]
            except OSError:
                os.ftruncate(fd, size)
                raise
            self._started = True
        finally:
            os.close(fd)

    def _lose(self, count: int, why: str) -> None:
        self._lost += count
        if not self._warned and count:
            self._warned = True
            _log.warning("%s: trace records are being lost: %s. The run goes on.", self.path, why)


def read_trace(path: Path) -> list[Record]:
    """All records of a JSONL trace. A last line cut short (the writer was killed) is left out.

    Raises:
        OSError: the file cannot be read.
        ValueError: another line is not a record; the message names file and line.
    """
    decoder = msgspec.json.Decoder(Record)
    lines = path.read_bytes().split(b"\n")
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            records.append(decoder.decode(line))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}:{number}: not a telemetry record: {error}") from error
    return records


def write_csv(path: Path, records: Iterable[Record]) -> None:
    """Write records as CSV: a column per field in the order first seen; lists and mappings as JSON text.

    The file appears whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    rows = [msgspec.to_builtins(record) for record in records]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(
            {k: msgspec.json.encode(v).decode() if isinstance(v, list | dict) else v for k, v in row.items()}
        )
    part = path.with_name(f".{path.name}.part")
    part.write_text(text.getvalue(), encoding="utf-8")
    part.replace(path)


def prometheus_text(summary: Summary) -> str:
    """A summary in Prometheus' text exposition format (version 0.0.4). Times are in seconds, sizes in bytes."""
    out: list[str] = []

    def metric(name: str, kind: str, text: str, values: Iterable[tuple[str, float | None]]) -> None:
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            out.extend([f"# HELP splitlm_{name} {text}", f"# TYPE splitlm_{name} {kind}"])
            out.extend(f"splitlm_{name}{labels} {value!r}" for labels, value in known)

    metric("tokens_total", "counter", "Tokens decoded, first tokens excluded.", [("", summary.tokens)])
    metric("sessions_total", "counter", "Sessions that got a first token.", [("", summary.sessions)])
    metric("tokens_per_second", "gauge", "Decoded tokens per second.", [("", summary.tokens_per_s)])
    metric("bytes_per_token", "gauge", "Bytes all stages sent per decoded token.", [("", summary.bytes_per_token)])
    for name, text, spread in (
        ("ttft_seconds", "Time to first token.", summary.ttft_ms),
        ("tpot_seconds", "Time per output token: one lap.", summary.tpot_ms),
    ):
        if spread is not None:
            metric(
                name, "gauge", text, [('{quantile="0.5"}', spread.p50 / 1e3), ('{quantile="0.99"}', spread.p99 / 1e3)]
            )
    phases = ("compute", "recv_wait", "queue", "send")
    metric(
        "stage_seconds_total",
        "counter",
        "Time of decode steps per stage and phase.",
        [
            (f'{{node="{stage.node}",phase="{phase}"}}', getattr(stage, f"{phase}_ms") / 1e3)
            for stage in summary.stages
            for phase in phases
        ],
    )
    metric(
        "stage_kv_bytes",
        "gauge",
        "Largest KV of one session.",
        [(f'{{node="{s.node}"}}', s.kv_bytes) for s in summary.stages],
    )
    metric(
        "hop_seconds",
        "gauge",
        "Median time from the end of one stage's compute to the start of the next's.",
        [(f'{{source="{h.source}",target="{h.target}"}}', h.ms.p50 / 1e3) for h in summary.hops],
    )
    return "\n".join(out) + "\n" if out else ""
