"""A stage: one segment made of real modules on one device; the only thing that computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from splitlm.core.cut import Segment
from splitlm.core.errors import ProtocolError
from splitlm.model.cache import SessionCache
from splitlm.model.compute.base import Engine
from splitlm.model.compute.exact import ExactEngine
from splitlm.model.load import Loader, ModelFiles, Part


class Stage:
    """Runs its segment for any number of sessions, one session per forward.

    Positions are told, never inferred; a step that does not begin where the session's KV ends is refused.
    """

    def __init__(self, part: Part, files: ModelFiles, engine: Engine) -> None:
        self.segment: Segment = part.segment
        self.part = part
        self.dtype = files.dtype
        self.hidden = files.hidden
        self.vocab = files.vocab
        self.engine = engine
        self._sessions: dict[int, SessionCache] = {}

    def open(self, session: int) -> None:
        """Begin a session.

        Raises:
            ProtocolError: it is open already.
        """
        if session in self._sessions:
            raise ProtocolError(f"Session {session} was opened twice", where=str(self.segment))
        self._sessions[session] = SessionCache(self.segment.blocks, self.part.windows)

    def close(self, session: int) -> None:
        """Forget a session and its KV; nothing happens if there is none."""
        self._sessions.pop(session, None)

    def forward(
        self, session: int, inputs: torch.Tensor, position: int, *, logits: bool = False
    ) -> torch.Tensor | None:
        """One step of one session; see ``Engine.run`` for shapes.

        Raises:
            ProtocolError: no such session, a position that does not follow its KV, or inputs of a wrong shape or type.
        """
        cache = self._sessions.get(session)
        if cache is None:
            raise ProtocolError(
                f"Session {session} is not open", where=str(self.segment), expected="Open before Hidden"
            )
        if position != cache.seen:
            raise ProtocolError(
                f"Session {session} continues at position {position}",
                where=str(self.segment),
                expected=f"position {cache.seen}, where its KV ends",
            )
        self._check_inputs(inputs)
        out = self.engine.run(inputs, position, cache, logits)
        cache.seen += inputs.shape[1]
        return out

    def _check_inputs(self, inputs: torch.Tensor) -> None:
        if self.segment.embed:
            good = inputs.dtype == torch.int64 and inputs.dim() == 2 and inputs.shape[0] == 1 and inputs.shape[1] > 0
            if good and bool(((inputs < 0) | (inputs >= self.vocab)).any()):
                raise ProtocolError(
                    "A token id is out of range", where=str(self.segment), expected=f"0 to {self.vocab - 1}"
                )
        else:
            good = inputs.dtype == self.dtype and inputs.dim() == 3 and inputs.shape[0] == 1 and inputs.shape[1] > 0
            good = good and inputs.shape[2] == self.hidden
        if not good:
            expected = "token ids [1, n] int64" if self.segment.embed else f"[1, n, {self.hidden}] {self.dtype}"
            raise ProtocolError(
                f"Inputs of shape {list(inputs.shape)} and type {inputs.dtype} came",
                where=str(self.segment),
                expected=expected,
            )

    def kv_bytes(self, session: int | None = None) -> int:
        """Bytes of KV rows held for one session, or for all."""
        if session is not None:
            return self._sessions[session].nbytes if session in self._sessions else 0
        return sum(cache.nbytes for cache in self._sessions.values())

    @property
    def sessions(self) -> list[int]:
        """The open sessions."""
        return list(self._sessions)


def build_stages(files: ModelFiles, segments: Sequence[Segment], *, loader: Loader = "shard") -> list[Stage]:
    """The stages of one node, weights loaded, sharing what they can (see ``ModelFiles.load`` for errors)."""
    parts = files.load(segments, loader)
    return [Stage(part, files, ExactEngine(part, files.family)) for part in parts]


def resident_bytes(stages: Sequence[Stage]) -> int:
    """Bytes of weights and buffers that the stages of one process hold, shared storage counted once."""
    seen: dict[int, int] = {}
    for stage in stages:
        for tensor in stage.part.tensors():
            storage: Any = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
    return sum(seen.values())
