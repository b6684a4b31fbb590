"""One generation as the head sees it: what is still to be fed, what came home, and when it ends."""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from dataclasses import dataclass, field

import msgspec
import torch

from splitlm.core.errors import ProtocolError, SplitlmError, from_exit_code
from splitlm.core.sampling import FinishReason
from splitlm.infer.meter import Meter
from splitlm.infer.relay import Step
from splitlm.infer.request import Request, TokenOut
from splitlm.model import payload
from splitlm.telemetry.record import Session as SessionRecord
from splitlm.telemetry.record import Step as StepRecord
from splitlm.telemetry.summary import percentile
from splitlm.wire.frame import Failed, Frame, Hidden, Open, Spec, Token

MAX_REASON = 1000
"""Characters of another node's reason that are shown."""


@dataclass
class Lap:
    """A step of the first segment, and its token's way home.

    Attributes:
        arrived_ns: when its input was known, and ``bytes_in`` how large the frame was that brought it.
        step: once it was computed.
        bytes_out: of the frame that came of it.
        record: once it was sent.
        tpot_ms: once its token is home, which on a fast ring may be heard of before the sending; ``ttft_ms`` alike.
    """

    arrived_ns: int
    prefill: bool
    bytes_in: int
    step: Step | None = None
    bytes_out: int = 0
    record: StepRecord | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None

    def measure(self, meter: Meter, step: Step, sent_ns: int) -> None:
        """Its frames are with the kernel since then."""
        self.record = meter.measure(
            step,
            arrived_ns=self.arrived_ns,
            sent_ns=sent_ns,
            prefill=self.prefill,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
        )

    def write(self, meter: Meter) -> None:
        """Its record, once there is one, with what its token told."""
        if self.record is not None:
            meter.write(self.record, tpot_ms=self.tpot_ms, ttft_ms=self.ttft_ms)


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

    def opening(self, context: int) -> tuple[Frame, Frame]:
        """The frame that opens this session, and the one for the stage that samples: it may need the prompt's ids."""
        request = self.request
        opened = Open(session=self.number, context=context, sampling=request.sampling, logits=request.logits)
        if not request.sampling.needs_history:
            return Frame(opened), Frame(opened)
        spec, view = payload.dump(torch.tensor(request.prompt, dtype=torch.int64))
        return Frame(opened), Frame(msgspec.structs.replace(opened, tensors=(spec,)), (view,))

    def feed(self, epoch: int) -> Frame:
        """The next rows for the first segment: a chunk of the prompt, or the newest token."""
        if self.chunks:
            begin, end = self.chunks.popleft()
            ids, position, sample = list(self.request.prompt[begin:end]), begin, not self.chunks
        else:
            ids, position, sample = self.tokens[-1:], self.position, True
        view = memoryview(array("q", ids)).cast("B")  # as ``payload.dump`` of a tensor, which takes ten times as long
        spec = Spec("int64", (1, len(ids)))
        header = Hidden(session=self.number, epoch=epoch, position=position, sample=sample, tensors=(spec,))
        return Frame(header, (view,))

    def take(self, header: Token, when_ns: int, vocab: int) -> Lap | None:
        """Its next token came home at this time; returns the lap that made it, which now knows its own.

        Raises:
            ProtocolError: the token is not the next one, or none of the vocabulary.
        """
        expected = self.position + 1
        if header.position != expected or not 0 <= header.token < vocab:
            raise ProtocolError(
                f"Token {header.token} of session {header.session} came for position {header.position}",
                expected=f"position {expected}, ids below {vocab}",
            )
        self.tokens.append(header.token)
        lap, self.pending = self.pending, None
        tpot = ttft = None
        if len(self.tokens) == 1:
            ttft = self.ttft_ms = (when_ns - self.asked_ns) / 1e6
        else:
            tpot = (when_ns - self.arrived_ns) / 1e6
            self.laps_ms.append(tpot)
        if lap is not None:
            lap.tpot_ms, lap.ttft_ms = tpot, ttft
        return lap

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

    def record(self, error: Exception | None = None) -> SessionRecord:
        """The session's line in the trace; ``error`` is what ended it, where something did."""
        laps = self.laps_ms
        return SessionRecord(
            session=self.number,
            prompt_tokens=len(self.request.prompt),
            new_tokens=len(self.tokens),
            finish=self.finish or ("cancelled" if error is None else "failed"),
            reason=None if error is None else str(error) or type(error).__name__,
            seed=None if self.request.sampling.greedy else self.request.sampling.seed,
            ttft_ms=self.ttft_ms,
            tpot_p50_ms=percentile(laps, 50) if laps else None,
            tpot_p99_ms=percentile(laps, 99) if laps else None,
        )


def error_of(header: Failed) -> SplitlmError:
    """What the caller of a session that failed on a stage is to see."""
    words = "".join(c if c.isprintable() else " " for c in header.reason)
    return from_exit_code(header.code, words if len(words) <= MAX_REASON else words[:MAX_REASON] + "…")


def logits_of(frame: Frame, vocab: int) -> torch.Tensor | None:
    """A copy of the logits that came beside a token, if any did."""
    if not frame.tensors:
        return None
    logits = payload.load(frame.header.tensors[0], frame.tensors[0])
    if logits.dtype != torch.float32 or logits.shape != (vocab,):
        raise ProtocolError(
            f"Logits of shape {list(logits.shape)} and type {logits.dtype} came with a token",
            expected=f"[{vocab}] torch.float32",
        )
    return logits.clone()
