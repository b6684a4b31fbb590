"""The reference engine: transformers' modules, with the parts that others hold left out."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from splitlm.model.cache import SessionCache
from splitlm.model.family import Family
from splitlm.model.load import Part


class ExactEngine:
    """Runs a segment through the causal model it was cut from."""

    name = "exact"

    def __init__(self, part: Part, family: Family) -> None:
        self._part = part
        self._causal: Any = part.module
        self._base: Any = getattr(part.module, family.base)
        # transformers renamed the argument between 5.x releases.
        names = inspect.signature(self._base.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"

    @torch.inference_mode()
    def run(self, inputs: torch.Tensor, position: int, cache: SessionCache, logits: bool) -> torch.Tensor | None:
        """See ``Engine.run``."""
        segment = self._part.segment
        positions = torch.arange(position, position + inputs.shape[1]).unsqueeze(0)
        given: dict[str, Any] = {
            "input_ids" if segment.embed else "inputs_embeds": inputs,
            "position_ids": positions,
            self._cache_name: cache if segment.count else None,
            "use_cache": segment.count > 0,
        }
        if segment.head and logits:
            out: torch.Tensor = self._causal(**given, logits_to_keep=1).logits
            return out[0, -1]
        hidden: torch.Tensor = self._base(**given)[0]
        return None if segment.head else hidden
