"""What every engine offers to the stage that owns it."""

from __future__ import annotations

from typing import Protocol

import torch

from splitlm.model.cache import SessionCache


class Engine(Protocol):
    """Runs one segment for one session at a time."""

    name: str

    def run(self, inputs: torch.Tensor, position: int, cache: SessionCache, logits: bool) -> torch.Tensor | None:
        """One step.

        Args:
            inputs: token ids ``[1, n]`` (int64) on a segment with the embedding, else hidden states ``[1, n, hidden]``.
            position: of the first of the n rows.
            cache: the session's KV on this segment; grows by n rows.
            logits: whether the last row's logits are wanted (segments with the head).

        Returns:
            Hidden states ``[1, n, hidden]``; on a segment with the head the last row's logits ``[vocab]``, or None
            where they are not wanted.
        """
        ...
