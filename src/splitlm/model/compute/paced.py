"""A simulated device: the real forward, then sleep until the time that a slower machine would have taken has passed.

Used where two cores cannot stand for three machines. Never chosen by default.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from splitlm.model.compute.base import Engine, Job
from splitlm.model.part import Part


class PacedEngine:
    """Runs another engine, and takes at least ``block_ms`` per block for every step."""

    def __init__(self, engine: Engine, part: Part, block_ms: float) -> None:
        self.name = f"{engine.name}, paced at {block_ms:g} ms per block"
        self.width = engine.width
        self._engine, self._part = engine, part
        self.block_ms = block_ms

    def run(self, jobs: Sequence[Job]) -> list[torch.Tensor | None]:
        """See ``Engine.run``."""
        until = time.perf_counter() + self._part.segment.count * self.block_ms / 1e3
        out = self._engine.run(jobs)
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return out
