"""The reference engine: transformers' modules, with the parts that others hold left out."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from splitlm.model.compute.base import Job
from splitlm.model.family import Family
from splitlm.model.part import Part


class ExactEngine:
    """Runs a segment through the causal model it was cut from, one session after the other.

    Args:
        name: of another engine whose modules stand in that model in place of transformers' own.
    """

    def __init__(self, part: Part, family: Family, name: str = "exact") -> None:
        self.name, self.width = name, 1
        self._part = part
        self._causal: Any = part.module
        self._base: Any = getattr(part.module, family.base)
        # transformers renamed the argument between 5.x releases.
        names = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    def run(self, jobs: Sequence[Job]) -> list[torch.Tensor | None]:
        """See ``Engine.run``."""
        return [self._one(job) for job in jobs]

    @torch.inference_mode()
    def _one(self, job: Job) -> torch.Tensor | None:
        segment = self._part.segment
        positions = torch.arange(job.position, job.position + job.inputs.shape[1]).unsqueeze(0)
        given: dict[str, Any] = {
            "input_ids" if segment.embed else "inputs_embeds": job.inputs,
            "position_ids": positions,
            self._cache_name: job.cache if segment.count else None,
            "use_cache": segment.count > 0,
        }
        if segment.head and job.logits:
            out: torch.Tensor = self._causal(**given, logits_to_keep=1).logits
            return out[0, -1]
        hidden: torch.Tensor = self._base(**given)[0]
        return None if segment.head else hidden
