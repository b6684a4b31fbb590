"""Where records go: a JSONL file per stage.

A record is written once per token on the way between two frames. So ``Trace.write`` only appends to a bounded queue
(under a microsecond); a thread encodes and writes four times a second. What the disk does not take is lost and counted:
telemetry never stops a run.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from splitlm.telemetry.record import Record

PERIOD_S = 0.25
QUEUE_RECORDS = 65_536
BATCH_RECORDS = 1024
CLOSE_S = 2.0
_OF_A_STAGE = re.compile(r"trace-node\d+\.jsonl|stage-\d+\.log")

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


def clear_run(folder: Path) -> None:
    """Remove what stages of an older run left in a folder that is used again: their traces and logs, nothing else.

    A ring of fewer stages would not replace all of them, and whoever reads the folder would mix two runs. This is the
    head's to do, before the ring is there: a stage may join while others write into the same folder, and replaces its
    own file alone.

    Raises:
        OSError: a file cannot be removed.
    """
    if folder.is_dir():
        for path in folder.iterdir():
            if _OF_A_STAGE.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)


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
