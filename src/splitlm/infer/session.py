"""One generation as the head sees it: what is still to be fed, what came home, and when it ends."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from splitlm.core.sampling import FinishReason
from splitlm.infer.relay import Step
from splitlm.infer.request import Request, TokenOut
from splitlm.telemetry.record import Session as SessionRecord
from splitlm.telemetry.record import Step as StepRecord
from splitlm.telemetry.summary import percentile


@dataclass
class Lap:
    """A step of the first segment, and its token's way home.

    Attributes:
        arrived_ns: when its input was known, and ``bytes_in`` how large the frame was that brought it.
        step: once it was computed.
        record: once it was sent.
        tpot_ms: once its token is home, which on a fast ring may be heard of before the sending; ``ttft_ms`` alike.
    """

    arrived_ns: int
    prefill: bool
    bytes_in: int
    step: Step | None = None
    record: StepRecord | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None


@dataclass
class Session:
    """State of one session.

    Attributes:
        number: its number on every frame.
        asked_ns: when it was asked for.
        chunks: ``[begin, end)`` parts of the prompt that are still to be fed.
        out: what its caller receives.
        tokens: generated so far.
        arrived_ns: when its next input became known, and ``bytes_in`` how large the frame was that brought it.
        pending: the lap under way.
    """

    number: int
    request: Request
    asked_ns: int
    chunks: deque[tuple[int, int]]
    out: asyncio.Queue[TokenOut | Exception] = field(default_factory=asyncio.Queue)
    tokens: list[int] = field(default_factory=list)
    arrived_ns: int = 0
    bytes_in: int = 0
    laps_ms: list[float] = field(default_factory=list)
    ttft_ms: float | None = None
    pending: Lap | None = None
    finish: FinishReason | None = None

    @property
    def position(self) -> int:
        """Place of the newest token in the sequence."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def ends_with(self, token: int, context: int) -> FinishReason | None:
        """Why the newest token is the last, or None."""
        request = self.request
        if token in request.eos_ids:
            return "eos"
        if request.accept is not None and (reason := request.accept(token)) is not None:
            return reason
        if len(self.tokens) >= request.max_new_tokens:
            return "length"
        return "context" if self.position >= context else None

    def record(self) -> SessionRecord:
        """The session's line in the trace."""
        laps = self.laps_ms
        return SessionRecord(
            session=self.number,
            prompt_tokens=len(self.request.prompt),
            new_tokens=len(self.tokens),
            finish=self.finish or "cancelled",
            ttft_ms=self.ttft_ms,
            tpot_p50_ms=percentile(laps, 50) if laps else None,
            tpot_p99_ms=percentile(laps, 99) if laps else None,
        )
