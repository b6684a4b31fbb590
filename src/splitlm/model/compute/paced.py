"""A simulated device: the real forward, then sleep until the time that a slower machine would have taken has passed.

Used where two cores cannot stand for three machines. Never chosen by default.
"""

from __future__ import annotations

import time

import torch

from splitlm.model.cache import SessionCache
from splitlm.model.compute.base import Engine


class PacedEngine:
    """Runs another engine, and takes at least ``step_ms`` for every step."""

    def __init__(self, engine: Engine, step_ms: float) -> None:
        self.name = f"{engine.name}, paced at {step_ms:g} ms"
        self._engine = engine
        self._step_s = step_ms / 1e3

    def run(self, inputs: torch.Tensor, position: int, cache: SessionCache, logits: bool) -> torch.Tensor | None:
        """See ``Engine.run``."""
        until = time.perf_counter() + self._step_s
        out = self._engine.run(inputs, position, cache, logits)
        left = until - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return out
