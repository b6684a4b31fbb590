"""What a stage does with frames: at most one frame out for each that came in. No sockets, no event loop."""

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
from splitlm.model.stage import Step as Rows
from splitlm.wire.frame import AnyHeader, Buffer, Close, Failed, Fence, Frame, Header, Hidden, Open, Token


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
        batch: how many sessions shared the forward, this one included; their steps begin and end together.
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
    batch: int = 1


@dataclass(frozen=True, slots=True)
class _Taken:
    """A frame with rows, as the stage takes it; ``samples`` where a token is to come of it."""

    header: Hidden
    opened: Open
    inputs: torch.Tensor
    samples: bool


class Relay:
    """One segment's part in a ring.

    A step that fails by its session's own fault (logits that are not finite, no memory for it) ends that session only:
    a ``Failed`` frame goes home in its place, and what follows of the session is dropped until its ``Close``. Where
    memory runs out in a forward that several sessions share, it ends all of these: the keys and values of each may have
    grown by then.

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
        first = stage.segment.embed
        self._one_row = ("int64", (1, 1)) if first else (payload.dtype_name(stage.dtype), (1, 1, stage.hidden))

    def weigh(self, step: Step) -> Step:
        """Add to a step of this relay what only records want to know: the next stage need not wait for it."""
        if step.rows:
            step.kv_bytes = self.stage.kv_bytes(step.session)
        return step

    def handle(self, frame: Frame) -> Step:
        """``advance`` and ``weigh``. Raises as ``advance``."""
        return self.weigh(self.advance(frame))

    def handle_many(self, frames: Sequence[Frame]) -> list[Step]:
        """``advance_many`` and ``weigh``. Raises as ``advance``."""
        return [self.weigh(step) for step in self.advance_many(frames)]

    @property
    def width(self) -> int:
        """How many sessions may share a forward."""
        return self.stage.engine.width

    def joins(self, frame: Frame, others: Sequence[Frame] = ()) -> bool:
        """Whether the forward of ``others``, frames that join each other, can be this frame's too.

        It can where the frame is a decode step against which nothing speaks, of a session that is not among them. All
        else is for ``advance``, and so is every frame while no other session decodes. Ask where this relay computes, or
        while it does not.
        """
        header = frame.header
        if len(self._decoding) < 2 or len(others) >= self.width:  # first: a session alone is to lose no time by this
            return False
        if not isinstance(header, Hidden) or len(header.tensors) != 1:
            return False
        session, stage, spec = header.session, self.stage, header.tensors[0]
        return (
            header.epoch == self.epoch
            and session in self._decoding  # and so it is open, and has not failed
            and header.position == stage.seen(session) < self._opened[session].context
            and (spec.dtype, spec.shape) == self._one_row
            and all(getattr(other.header, "session", None) != session for other in others)
        )

    def advance_many(self, frames: Sequence[Frame]) -> list[Step]:
        """A step for each of these frames: one alone, or several that join each other, in one forward.

        Runs on the compute thread. Raises as ``advance``.
        """
        if len(frames) == 1:
            return [self.advance(frames[0])]
        taken = [self._taken(frame) for frame in frames]
        start = time.monotonic_ns()
        steps = self._shared(taken, start)
        end = time.monotonic_ns()
        for step in steps:
            step.end_ns, step.batch = end, len(frames)
        return steps

    def advance(self, frame: Frame) -> Step:
        """The step of one frame. Runs on the compute thread; the frame may be released afterwards.

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
                raise self._misplaced(other)

    def _misplaced(self, header: AnyHeader) -> ProtocolError:
        return ProtocolError(
            f"A {type(header).__name__} frame came",
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
        if header.session in self._failed and header.epoch == self.epoch:  # sent before the head heard of it
            now = time.monotonic_ns()
            return Step(None, (), now, now, header.session)
        taken = self._taken(frame)
        start = time.monotonic_ns()
        try:
            out = self.stage.forward(header.session, taken.inputs, header.position, logits=taken.samples)
            step = self._outcome(taken, out, start)
        except (ModelError, MemoryError, RuntimeError) as error:
            fault = self._fault(taken, error)
            if fault is None:
                raise
            step = self._failure(header, fault, start)
        step.end_ns = time.monotonic_ns()
        return step

    def _shared(self, taken: Sequence[_Taken], start: int) -> list[Step]:
        """One forward of all of them, and what came of it for each."""
        rows = [Rows(t.header.session, t.inputs, t.header.position, t.samples) for t in taken]
        try:
            outs = self.stage.forward_many(rows)
        except (MemoryError, RuntimeError) as error:
            faults = [self._fault(t, error, len(taken)) for t in taken]
            if None in faults:
                raise
            return [self._failure(t.header, f, start) for t, f in zip(taken, faults, strict=True) if f is not None]
        steps = []
        for one, out in zip(taken, outs, strict=True):
            try:
                steps.append(self._outcome(one, out, start))
            except (ModelError, MemoryError, RuntimeError) as error:
                fault = self._fault(one, error)
                if fault is None:
                    raise
                steps.append(self._failure(one.header, fault, start))
        return steps

    def _taken(self, frame: Frame) -> _Taken:
        """What the stage is to compute for a frame; its place in the session is checked by the stage."""
        header = frame.header
        if not isinstance(header, Hidden):
            raise self._misplaced(header)
        if header.epoch != self.epoch:
            raise ProtocolError(
                f"A frame of epoch {header.epoch} came", where=str(self.stage.segment), expected=f"epoch {self.epoch}"
            )
        session, opened = header.session, self._opened.get(header.session)
        if opened is None:
            raise ProtocolError(f"Session {session} is not open", where=str(self.stage.segment), expected="Open first")
        inputs = _tensor(frame)
        if inputs.dim() > 1 and header.position + inputs.shape[1] > opened.context:
            raise ProtocolError(
                f"Session {session} reaches position {header.position + inputs.shape[1]}",
                where=str(self.stage.segment),
                expected=f"at most {opened.context}, its context",
            )
        return _Taken(header, opened, inputs, self.stage.segment.head and header.sample)

    def _fault(self, taken: _Taken, error: Exception, together: int = 1) -> SplitlmError | None:
        """What this session's caller is to be told; None where the error is not this session's own.

        Args:
            together: how many sessions it ends.
        """
        header, inputs = taken.header, taken.inputs
        whose, where = f"Session {header.session}", f"node {self.node} ({self.stage.segment})"
        if isinstance(error, ModelError):
            return ModelError(f"{whose}: {error.what}", where=where, expected=error.expected, remedy=error.remedy)
        end = header.position + (inputs.shape[1] if inputs.dim() > 1 else 1) - 1
        rows = f"position {end}" if end == header.position else f"positions {header.position} to {end}"
        shared = f", in a step of {together} sessions, which ends them all" if together > 1 else ""
        fault = out_of_memory(error, f"{whose}, {rows}{shared}")
        if fault is not None:
            fault.where = where
        return fault

    def _failure(self, header: Hidden, fault: SplitlmError, start: int) -> Step:
        """The session ends here, and its ``Failed`` frame goes home."""
        self._forget(header.session)
        self._failed.add(header.session)
        told = trouble(fault)
        failed = Failed(session=header.session, code=told.code, reason=told.text)
        return Step(failed, (), start, start, header.session, header.position)

    def _outcome(self, taken: _Taken, out: torch.Tensor | None, start: int) -> Step:
        """What goes on of a session whose rows were computed."""
        header, session = taken.header, taken.header.session
        prefill = session not in self._decoding
        rows = taken.inputs.shape[1]
        onward: Header | None = None
        tensors: Sequence[Buffer] = ()
        logits = None
        if taken.samples and out is not None:
            token = self._samplers[session].next(out, header.position + rows)
            specs = []
            if taken.opened.logits:
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
        return Step(onward, tensors, start, start, session, header.position, rows, 0, prefill, logits)


def _tensor(frame: Frame) -> torch.Tensor:
    """The one tensor of a frame, sharing the frame's memory."""
    if len(frame.tensors) != 1:
        raise ProtocolError(f"A frame with {len(frame.tensors)} tensors came", expected="one tensor")
    return payload.load(frame.header.tensors[0], frame.tensors[0])
