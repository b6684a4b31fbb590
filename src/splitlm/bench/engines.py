"""Arms that show an engine at work: sessions that share its products, and what it takes before the first token."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from splitlm.bench.generators import prompt, whole_stage
from splitlm.model.stage import Step


class BatchWork:
    """Sessions of the whole model that take every step together, as many at once as the engine lets share one.

    Args:
        model: its folder.
    """

    def __init__(self, *, model: str, dtype: str, compute: str) -> None:
        _, self._stage = whole_stage(model, dtype, compute)
        self.told: dict[str, Any] = {"width": self._stage.engine.width}

    def run(self, *, tokens: int, sessions: int) -> dict[str, Any]:
        """Generate once in each session, greedily."""
        stage = self._stage
        begin = time.perf_counter()
        for session in range(sessions):
            stage.open(session)
        prompts = [prompt(session) for session in range(sessions)]
        last = self._step([Step(i, torch.tensor([ids]), 0, True) for i, ids in enumerate(prompts)])
        for made in range(1, tokens):
            at = len(prompts[0]) + made - 1
            last = self._step([Step(i, torch.tensor([[token]]), at, True) for i, token in enumerate(last)])
        seconds = time.perf_counter() - begin
        for session in range(sessions):
            stage.close(session)
        return {"tokens": tokens * sessions, "seconds": seconds}

    def _step(self, steps: Sequence[Step]) -> list[int]:
        """The most probable next token of each."""
        width, chosen = self._stage.engine.width, []
        for begin in range(0, len(steps), width):
            for logits in self._stage.forward_many(steps[begin : begin + width]):
                if logits is None:
                    raise RuntimeError("a stage gave nothing")
                chosen.append(int(logits.argmax()))
        return chosen

    def close(self) -> None:
        """Nothing to do."""


class LoadWork:
    """The whole model, loaded for an engine; it generates nothing.

    Args:
        model: its folder.
    """

    def __init__(self, *, model: str, dtype: str, compute: str) -> None:
        begin = time.perf_counter()
        self._files, self._stage = whole_stage(model, dtype, compute)
        self.told: dict[str, Any] = {"ms": 1e3 * (time.perf_counter() - begin)}

    def run(self) -> dict[str, Any]:
        """Pack every block anew, one by one, as a stage does with a block that comes: milliseconds per block."""
        timings: dict[str, float] = {}
        for index in range(self._files.blocks):
            self._stage.load_blocks([index], timings)
        return {"ms": timings["pack"] / self._files.blocks}

    def close(self) -> None:
        """Nothing to do."""
