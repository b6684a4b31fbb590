"""The modules of one segment, as they were loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from splitlm.core.cut import Segment


@dataclass
class Part:
    """The modules of one segment, and how they came to be.

    Attributes:
        module: the causal model of transformers with what is not ours left out.
        windows: sliding window of each block of ours, or None.
        timings: milliseconds of ``construct``, ``read``, ``assign`` and ``pack``.
    """

    segment: Segment
    module: Any
    windows: list[int | None]
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Number of parameters held; a table that is both embedding and head counts once."""
        return sum({p.data_ptr(): p.numel() for p in self.module.parameters()}.values())

    def tensors(self) -> list[torch.Tensor]:
        """Everything held, parameters and buffers."""
        return [*self.module.parameters(), *self.module.buffers()]
