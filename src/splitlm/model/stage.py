"""A stage: one segment made of real modules on one device; the only thing that computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from splitlm.core.cut import Segment
from splitlm.core.errors import ProtocolError
from splitlm.model.cache import BlockKV, SessionCache
from splitlm.model.compute.base import Engine, Job
from splitlm.model.compute.choice import kind_of
from splitlm.model.compute.exact import ExactEngine
from splitlm.model.compute.fast import FusedEngine
from splitlm.model.compute.packing import Packing
from splitlm.model.compute.products import Kind, products
from splitlm.model.load import Loader, ModelFiles
from splitlm.model.part import Part
from splitlm.model.skeleton import set_blocks


@dataclass(frozen=True)
class Step:
    """One session's part of a forward; see ``Job`` for shapes."""

    session: int
    inputs: torch.Tensor
    position: int
    logits: bool = False


class Stage:
    """Runs its segment for any number of sessions.

    Positions are told, never inferred; a step that does not begin where the session's KV ends is refused.

    Args:
        packing: how blocks are packed that come later; None leaves them as they are.
    """

    def __init__(self, part: Part, files: ModelFiles, engine: Engine, packing: Packing | None = None) -> None:
        self.part = part
        self.packing = packing
        self._files = files
        self.dtype = files.dtype
        self.hidden = files.hidden
        self.vocab = files.vocab
        self.engine = engine
        self._sessions: dict[int, SessionCache] = {}

    @property
    def segment(self) -> Segment:
        """What it holds now."""
        return self.part.segment

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
        """One step of one session; see ``Job`` and ``Engine.run`` for shapes.

        Raises:
            ProtocolError: no such session, a position that does not follow its KV, or inputs of a wrong shape or type.
        """
        (out,) = self.forward_many([Step(session, inputs, position, logits)])
        return out

    def forward_many(self, steps: Sequence[Step]) -> list[torch.Tensor | None]:
        """A step of each of several sessions at once: ``engine.width`` at most.

        Raises:
            ProtocolError: as ``forward`` does, before anything was computed; or a session that comes twice.
        """
        jobs = [self._job(step) for step in steps]
        if len({step.session for step in steps}) < len(steps):
            raise ProtocolError("A session came twice in one step", where=str(self.segment), expected="one step each")
        out = self.engine.run(jobs)
        for job in jobs:
            job.cache.seen += job.inputs.shape[1]
        return out

    def _job(self, step: Step) -> Job:
        session, cache = step.session, self._sessions.get(step.session)
        if cache is None:
            raise ProtocolError(
                f"Session {session} is not open", where=str(self.segment), expected="Open before Hidden"
            )
        if step.position != cache.seen:
            raise ProtocolError(
                f"Session {session} continues at position {step.position}",
                where=str(self.segment),
                expected=f"position {cache.seen}, where its KV ends",
            )
        self._check_inputs(step.inputs)
        return Job(step.inputs, step.position, cache, step.logits)

    def _check_inputs(self, inputs: torch.Tensor) -> None:
        if self.segment.embed:
            good = inputs.dtype == torch.int64 and inputs.dim() == 2 and inputs.shape[0] == 1 and inputs.shape[1] > 0
            ids = inputs.reshape(-1).tolist() if good else [0]
            if min(ids) < 0 or max(ids) >= self.vocab:
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

    def seen(self, session: int) -> int:
        """Tokens that a session has seen here; 0 where it is not open."""
        return self._sessions[session].seen if session in self._sessions else 0

    def take_rows(self, session: int, block: int, first: int, limit: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        """A copy of a session's KV rows of one block, see ``BlockKV.take``; no rows where the session is not open."""
        cache = self._sessions.get(session)
        if cache is None:
            return torch.empty(0), torch.empty(0), first
        return cache.by_block[block].take(first, limit)

    def load_blocks(self, indices: Sequence[int], timings: dict[str, float]) -> list[nn.Module]:
        """Blocks that could be held here, ready for this stage's engine; see ``ModelFiles.load_blocks``."""
        base = getattr(self.part.module, self._files.family.base)
        return self._files.load_blocks(indices, timings, self.packing, base)

    def change(
        self, segment: Segment, blocks: Mapping[int, nn.Module], kv: Mapping[int, Mapping[int, BlockKV]]
    ) -> Moved:
        """Hold another segment from now on; nothing may be computing.

        Args:
            segment: with the same ends of the model as before.
            blocks: modules of the blocks that come, by index.
            kv: their KV, by session and block.

        Returns:
            What left: nothing of it is touched, so that it can still serve if it must come back.
        """
        part = self.part
        base = getattr(part.module, self._files.family.base)
        have = dict(zip(part.segment.blocks, self._files.family.blocks_of(base), strict=True))
        missing = [i for i in segment.blocks if i not in have and i not in blocks]
        if missing or (segment.embed, segment.head) != (part.segment.embed, part.segment.head):
            raise ProtocolError(
                f"{segment} cannot follow {part.segment}", expected=f"blocks {missing} to be brought first"
            )
        set_blocks(
            part.module,
            self._files.family,
            segment,
            [have.get(i) or blocks[i] for i in segment.blocks],
            self._files.config,
        )
        part.segment = segment
        part.windows = [self._files.windows[i] for i in segment.blocks]
        left = {
            session: cache.rearrange(segment.blocks, part.windows, kv.get(session, {}))
            for session, cache in self._sessions.items()
        }
        return Moved({i: module for i, module in have.items() if i not in segment.blocks}, left)

    @property
    def sessions(self) -> list[int]:
        """The open sessions."""
        return list(self._sessions)


@dataclass
class Moved:
    """Blocks that left a stage: modules by index, KV by session and block."""

    blocks: dict[int, nn.Module]
    kv: dict[int, dict[int, BlockKV]]

    def release(self) -> int:
        """Give their memory back at once: modules may hang in reference cycles, storage does not. Returns bytes."""
        freed = 0
        for module in self.blocks.values():
            for product in products(module):
                freed += product.nbytes
                product.release()
            for tensor in [*module.parameters(), *module.buffers()]:
                freed += tensor.nbytes
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.blocks.clear()
        self.kv.clear()
        return freed


def build_stages(
    files: ModelFiles, segments: Sequence[Segment], *, loader: Loader = "shard", compute: str | Kind = "exact"
) -> list[Stage]:
    """The stages of one node, weights loaded, sharing what they can (see ``ModelFiles.load`` for errors).

    Args:
        compute: an engine that this machine has (``compute/choice.py``), or what was tried already.

    Raises:
        UsageError: it has not.
    """
    if compute == "exact":
        return [Stage(part, files, ExactEngine(part, files.family)) for part in files.load(segments, loader)]
    packing = Packing(kind_of(compute) if isinstance(compute, str) else compute, files.family)
    parts = files.load(segments, loader, packing)
    return [Stage(part, files, _packed_engine(part, files, packing), packing) for part in parts]


def _packed_engine(part: Part, files: ModelFiles, packing: Packing) -> Engine:
    if packing.fused:
        return FusedEngine(part, files, packing)
    return ExactEngine(part, files.family, f"{packing.kind.name} (linear layers only)")


def resident_bytes(stages: Sequence[Stage]) -> int:
    """Bytes of weights and buffers that the stages of one process hold, shared storage counted once."""
    seen: dict[int, int] = {}
    packed = 0
    for stage in stages:
        for tensor in stage.part.tensors():
            storage: Any = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        packed += sum(product.nbytes for product in products(stage.part.module))
    return packed + sum(seen.values())
