"""The engine of packed weights: several sessions share each product, attention is each session's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from splitlm.model.compute.base import Job
from splitlm.model.compute.fused import Rows, Turn
from splitlm.model.compute.packing import Packing, Swapped, rotaries
from splitlm.model.load import ModelFiles
from splitlm.model.part import Part


class FusedEngine:
    """Runs a segment whose blocks are ``FusedBlock``.

    It computes in float32; hidden states, keys and values have the element type of the ring.
    """

    def __init__(self, part: Part, files: ModelFiles, packing: Packing) -> None:
        self.name = packing.kind.name
        self.width = packing.kind.width
        self._part, self._family, self._dtype = part, files.family, files.dtype
        self._base: Any = getattr(part.module, files.family.base)
        self._softcap = getattr(files.config, "final_logit_softcapping", None)
        self._rotaries = rotaries(self._base)

    @torch.inference_mode()
    def run(self, jobs: Sequence[Job]) -> list[torch.Tensor | None]:
        """See ``Engine.run``."""
        segment = self._part.segment
        rows: list[Rows] = []
        parts: list[torch.Tensor] = []
        for job in jobs:
            begin = rows[-1].end if rows else 0
            rows.append(Rows(begin, begin + job.inputs.shape[1], job.cache))
            parts.append(self._entered(job) if segment.embed else job.inputs[0].float())
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        turns = {kind: self._turn(kind, jobs) for kind in self._rotaries}
        for block in self._family.blocks_of(self._base):
            x = block.forward(x, rows, turns.get(block.kind, turns.get(None)))
        if segment.head:
            return self._logits(x, rows, jobs)
        return [x[part.begin : part.end].unsqueeze(0).to(self._dtype) for part in rows]

    def _entered(self, job: Job) -> torch.Tensor:
        x: torch.Tensor = getattr(self._base, self._family.embed)(job.inputs)[0]
        if self._family.positions:
            positions = torch.arange(job.position, job.position + job.inputs.shape[1])
            x = x + getattr(self._base, self._family.positions)(positions)
        return x.float()

    def _turn(self, kind: str | None, jobs: Sequence[Job]) -> Turn:
        found = [self._rotaries[kind].rows(job.position, job.position + job.inputs.shape[1]) for job in jobs]
        if len(found) == 1:
            return found[0]
        return torch.cat([cos for cos, _ in found]), torch.cat([sin for _, sin in found])

    def _logits(self, x: torch.Tensor, rows: Sequence[Rows], jobs: Sequence[Job]) -> list[torch.Tensor | None]:
        wanted = [part.end - 1 for part, job in zip(rows, jobs, strict=True) if job.logits]
        if not wanted:
            return [None] * len(jobs)
        last = x[wanted].to(self._dtype)
        normed = getattr(self._base, self._family.norm)(last)
        head: Swapped = getattr(self._part.module, self._family.head)
        logits = head.product(normed.float())
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        found = iter(logits)
        return [next(found) if job.logits else None for job in jobs]
