"""Turning what a stage did into trace records: where the time between two frames went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import msgspec

from splitlm.infer.relay import Step
from splitlm.telemetry.memory import peak_rss_bytes, rss_bytes
from splitlm.telemetry.record import Final
from splitlm.telemetry.record import Step as StepRecord
from splitlm.telemetry.sinks import Sink

MIB = 2**20
KEPT = 1000
"""Steps of a window whose times are remembered, where nobody asks for them."""


@dataclass
class Totals:
    """Sums over all steps of a stage (milliseconds, rows, bytes); a step that sessions shared counts once in times."""

    rows: int = 0
    compute_ms: float = 0.0
    recv_wait_ms: float = 0.0
    queue_ms: float = 0.0
    send_ms: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass
class Meter:
    """Measures one node. Times of one node lie end to end: each step begins where the one before it ended.

    Args:
        node: the stage's number.
        sink: where records go.
        decode: sums over decode steps only, for tables.
    """

    node: int
    sink: Sink
    epoch: int = 0
    totals: Totals = field(default_factory=Totals)
    decode: Totals = field(default_factory=Totals)
    last_end_ns: int = 0
    _window: dict[int, deque[float]] = field(default_factory=dict)
    _last_ns: int = 0
    _free_ns: int = 0
    _step_ns: int = 0
    _waiting: list[tuple[int, Callable[[int], None]]] = field(default_factory=list)

    def window_ms(self) -> float:
        """Median compute for a token since the last call, summed over the node's segments; 0 if none was decoded.

        A token's part of a step that sessions shared is an equal one.
        """
        window, self._window = self._window, {}
        return sum(median(times) for times in window.values())

    def after(self, when_ns: int, tell: Callable[[int], None]) -> None:
        """Call ``tell`` with the start of the first step that begins after this time (``time.monotonic_ns``)."""
        self._waiting.append((when_ns, tell))

    def measure(
        self,
        step: Step,
        *,
        arrived_ns: int,
        sent_ns: int,
        prefill: bool,
        bytes_in: int,
        bytes_out: int,
        segment: int | None = None,
    ) -> StepRecord:
        """The record of one step, not yet written. Call it when the step's output is sent, in the order of the steps.

        Args:
            arrived_ns: when its input was complete.
            sent_ns: when its output was with the kernel; of steps that were one forward, when the last one's was.
        """
        if self._waiting:
            due = [tell for when, tell in self._waiting if when < step.start_ns]
            self._waiting = [(when, tell) for when, tell in self._waiting if when >= step.start_ns]
            for tell in due:
                tell(step.start_ns)
        self.last_end_ns = step.end_ns
        if step.batch == 1 or step.start_ns != self._step_ns:  # else it is of the same forward as the one before
            self._step_ns, self._free_ns = step.start_ns, self._last_ns
        free_ns = self._free_ns or arrived_ns
        self._last_ns = sent_ns
        wait = max(0, arrived_ns - free_ns) / 1e6
        queue = max(0, step.start_ns - max(arrived_ns, free_ns)) / 1e6
        compute = (step.end_ns - step.start_ns) / 1e6
        send = max(0, sent_ns - step.end_ns) / 1e6
        if not prefill:
            self._window.setdefault(segment or 0, deque(maxlen=KEPT)).append(compute / step.batch)
        for sums in (self.totals,) if prefill else (self.totals, self.decode):
            sums.rows += step.rows
            sums.compute_ms += compute / step.batch
            sums.recv_wait_ms += wait / step.batch
            sums.queue_ms += queue / step.batch
            sums.send_ms += send / step.batch
            sums.bytes_in += bytes_in
            sums.bytes_out += bytes_out
        return StepRecord(
            node=self.node,
            session=step.session,
            position=step.position,
            count=step.rows,
            epoch=self.epoch,
            prefill=prefill,
            compute_ms=compute,
            recv_wait_ms=wait,
            queue_ms=queue,
            send_ms=send,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            kv_bytes=step.kv_bytes,
            rss_mb=rss_bytes() / MIB,
            start_ns=step.start_ns,
            end_ns=step.end_ns,
            segment=segment,
            batch=step.batch,
        )

    def write(self, record: StepRecord, *, tpot_ms: float | None = None, ttft_ms: float | None = None) -> None:
        """Write a record; on the head with the lap or the time to the first token that it began."""
        if tpot_ms is not None or ttft_ms is not None:
            record = msgspec.structs.replace(record, tpot_ms=tpot_ms, ttft_ms=ttft_ms)
        self.sink.write(record)

    def final(self, import_rss_mb: float) -> Final:
        """The last line of a trace."""
        sums = self.totals
        return Final(
            node=self.node,
            tokens=sums.rows,
            peak_rss_mb=peak_rss_bytes() / MIB,
            import_rss_mb=import_rss_mb,
            compute_ms=sums.compute_ms,
            recv_wait_ms=sums.recv_wait_ms,
            queue_ms=sums.queue_ms,
            send_ms=sums.send_ms,
            bytes_in=sums.bytes_in,
            bytes_out=sums.bytes_out,
        )
