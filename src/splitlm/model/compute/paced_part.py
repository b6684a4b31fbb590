"""A simulated device in training: the real forward and backward, then sleep as ``compute/paced`` does.

Used where two cores cannot stand for several machines. Never chosen by default.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from splitlm.model.tuned import Goal, Key, TunedPart


class PacedPart(TunedPart):
    """Takes at least ``pace_ms`` for every forward and for every backward of a microbatch.

    Args:
        given: of ``TunedPart``.
        pace_ms: least time of either.
    """

    def __init__(self, *given: Any, pace_ms: float, **more: Any) -> None:
        super().__init__(*given, **more)
        self.pace_ms = pace_ms

    def forward(self, key: Key, inputs: torch.Tensor, mask: torch.Tensor, *, keep: bool = True) -> torch.Tensor:
        """See ``TunedPart.forward``."""
        until = time.perf_counter() + self.pace_ms / 1e3
        out = super().forward(key, inputs, mask, keep=keep)
        _sleep(until)
        return out

    def score(
        self, key: Key, inputs: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, goal: Goal, scale: float
    ) -> tuple[float, int]:
        """See ``TunedPart.score``."""
        until = time.perf_counter() + self.pace_ms / 1e3
        found = super().score(key, inputs, mask, labels, goal, scale)
        _sleep(until)
        return found

    def backward(self, key: Key, gradient: torch.Tensor | None = None) -> torch.Tensor | None:
        """See ``TunedPart.backward``."""
        until = time.perf_counter() + self.pace_ms / 1e3
        back = super().backward(key, gradient)
        _sleep(until)
        return back


def _sleep(until: float) -> None:
    left = until - time.perf_counter()
    if left > 0:
        time.sleep(left)
