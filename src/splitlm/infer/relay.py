"""What a stage does with a frame: frames in, at most one frame out. No sockets, no event loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitlm.core.errors import ModelError, ProtocolError, SplitlmError
from splitlm.core.messages import trouble
from splitlm.model import payload
from splitlm.model.runner import out_of_memory
from splitlm.model.sampling import Sampler
from splitlm.model.stage import Stage
from splitlm.wire.frame import Buffer, Close, Failed, Fence, Frame, Header, Hidden, Open, Token


@dataclass(slots=True)
class Step:
    """What came of one frame, and what it cost.

    Attributes:
        header: the frame to send on, or None.
        tensors: its payload.
        start_ns: start of compute (``time.monotonic_ns``).
        end_ns: end of compute.
        session: whose step it was.
        position: of its first row.
        rows: how many rows were computed; 0 for frames that only open or close a session, and for steps that failed.
        kv_bytes: of the session on this stage afterwards.
        prefill: whether the rows belong to the prompt.
        logits: ``[vocab]`` where the session asked for them and this stage sampled.
    """

    header: Header | None
    tensors: Sequence[Buffer]
    start_ns: int
    end_ns: int
    session: int
    position: int = 0
    rows: int = 0
    kv_bytes: int = 0
    prefill: bool = False
    logits: torch.Tensor | None = None


class Relay:
    """One segment's part in a ring.

    A step that fails by its session's own fault (logits that are not finite, no memory for it) ends that session only:
    a ``Failed`` frame goes home in its place, and what follows of the session is dropped until its ``Close``.

    Args:
        stage: the segment.
        epoch: of the cut it belongs to; frames of another are refused.
        node: that holds it, for messages.
    """

    def __init__(self, stage: Stage, epoch: int, node: int = 0) -> None:
        self.stage = stage
        self.epoch = epoch
        self.node = node
        self._opened: dict[int, Open] = {}
        self._samplers: dict[int, Sampler] = {}
        self._decoding: set[int] = set()
        self._failed: set[int] = set()

    def handle(self, frame: Frame) -> Step:
        """Take one frame. Runs on the compute thread; the frame may be released afterwards. Raises as ``advance``."""
        return self.weigh(self.advance(frame))

    def weigh(self, step: Step) -> Step:
        """Add to a step of this relay what only records want to know: the next stage need not wait for it."""
        if step.rows:
            step.kv_bytes = self.stage.kv_bytes(step.session)
        return step

    def advance(self, frame: Frame) -> Step:
        """``handle`` without ``weigh``.

        Raises:
            ProtocolError: a frame that has no place here: of another epoch, for a session not open, of wrong shape.
        """
        match frame.header:
            case Hidden() as hidden:
                return self._hidden(hidden, frame)
            case Open() as opened:
                return self._open(opened, frame)
            case Close(session=session):
                return self._close(session)
            case Failed(session=session) as failed:
                now = time.monotonic_ns()
                self._forget(session)
                return Step(failed, (), now, time.monotonic_ns(), session)
            case Fence() as fence:
                now = time.monotonic_ns()
                return Step(fence, (), now, now, 0)
            case other:
                raise ProtocolError(
                    f"A {type(other).__name__} frame came",
                    where=str(self.stage.segment),
                    expected="Open, Hidden, Close, Failed or Fence",
                )

    def _open(self, header: Open, frame: Frame) -> Step:
        now = time.monotonic_ns()
        prompt = self._prompt(frame) if header.tensors else []
        self.stage.open(header.session)
        self._opened[header.session] = header
        if self.stage.segment.head:
            self._samplers[header.session] = Sampler(header.sampling, prompt)
            return Step(None, (), now, time.monotonic_ns(), header.session)
        copies = [bytes(view) for view in frame.tensors]
        return Step(header, copies, now, time.monotonic_ns(), header.session)

    def _prompt(self, frame: Frame) -> list[int]:
        """The token ids that an Open frame brings for the sampler."""
        ids = _tensor(frame)
        good = ids.dtype == torch.int64 and ids.dim() == 1
        if not good or bool(((ids < 0) | (ids >= self.stage.vocab)).any()):
            raise ProtocolError(
                f"An Open frame brought a prompt of shape {list(ids.shape)} and type {ids.dtype}, or ids out of range",
                where=str(self.stage.segment),
                expected=f"[n] torch.int64, ids below {self.stage.vocab}",
            )
        return [int(i) for i in ids.tolist()]

    def _close(self, session: int) -> Step:
        now = time.monotonic_ns()
        self._forget(session)
        self._failed.discard(session)
        onward = None if self.stage.segment.head else Close(session=session)
        return Step(onward, (), now, time.monotonic_ns(), session)

    def _forget(self, session: int) -> None:
        self.stage.close(session)
        self._opened.pop(session, None)
        self._samplers.pop(session, None)
        self._decoding.discard(session)

    def _hidden(self, header: Hidden, frame: Frame) -> Step:
        session = header.session
        opened = self._opened.get(session)
        if header.epoch != self.epoch:
            raise ProtocolError(
                f"A frame of epoch {header.epoch} came", where=str(self.stage.segment), expected=f"epoch {self.epoch}"
            )
        if session in self._failed:  # sent before the head heard of it
            now = time.monotonic_ns()
            return Step(None, (), now, now, session)
        if opened is None:
            raise ProtocolError(f"Session {session} is not open", where=str(self.stage.segment), expected="Open first")
        inputs = _tensor(frame)
        if inputs.dim() > 1 and header.position + inputs.shape[1] > opened.context:
            raise ProtocolError(
                f"Session {session} reaches position {header.position + inputs.shape[1]}",
                where=str(self.stage.segment),
                expected=f"at most {opened.context}, its context",
            )
        start = time.monotonic_ns()
        try:
            return self._compute(header, opened, inputs, start)
        except (ModelError, MemoryError, RuntimeError) as error:
            fault = self._fault(header, inputs, error)
            if fault is None:
                raise
        self._forget(session)
        self._failed.add(session)
        told = trouble(fault)
        failed = Failed(session=session, code=told.code, reason=told.text)
        return Step(failed, (), start, time.monotonic_ns(), session, header.position)

    def _fault(self, header: Hidden, inputs: torch.Tensor, error: Exception) -> SplitlmError | None:
        """What this session's caller is to be told; None where the error is not this session's own."""
        whose, where = f"Session {header.session}", f"node {self.node} ({self.stage.segment})"
        if isinstance(error, ModelError):
            return ModelError(f"{whose}: {error.what}", where=where, expected=error.expected, remedy=error.remedy)
        end = header.position + (inputs.shape[1] if inputs.dim() > 1 else 1) - 1
        rows = f"position {end}" if end == header.position else f"positions {header.position} to {end}"
        fault = out_of_memory(error, f"{whose}, {rows}")
        if fault is not None:
            fault.where = where
        return fault

    def _compute(self, header: Hidden, opened: Open, inputs: torch.Tensor, start: int) -> Step:
        session = header.session
        samples = self.stage.segment.head and header.sample
        prefill = session not in self._decoding
        out = self.stage.forward(session, inputs, header.position, logits=samples)
        rows = inputs.shape[1]
        onward: Header | None = None
        tensors: Sequence[Buffer] = ()
        logits = None
        if samples and out is not None:
            token = self._samplers[session].next(out, header.position + rows)
            specs = []
            if opened.logits:
                logits = out.float()
                spec, view = payload.dump(logits)
                specs, tensors = [spec], [view]
            onward = Token(
                session=session, epoch=self.epoch, position=header.position + rows, token=token, tensors=tuple(specs)
            )
        elif out is not None:
            spec, view = payload.dump(out)
            tensors = [view]
            onward = Hidden(
                session=session, epoch=self.epoch, position=header.position, sample=header.sample, tensors=(spec,)
            )
        if header.sample:
            self._decoding.add(session)
        end = time.monotonic_ns()
        return Step(onward, tensors, start, end, session, header.position, rows, 0, prefill, logits)


def _tensor(frame: Frame) -> torch.Tensor:
    """The one tensor of a frame, sharing the frame's memory."""
    if len(frame.tensors) != 1:
        raise ProtocolError(f"A frame with {len(frame.tensors)} tensors came", expected="one tensor")
    return payload.load(frame.header.tensors[0], frame.tensors[0])
