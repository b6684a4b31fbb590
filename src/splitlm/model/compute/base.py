"""What every engine offers to the stage that owns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from splitlm.model.cache import SessionCache


@dataclass(frozen=True)
class Job:
    """One step of one session.

    Attributes:
        inputs: token ids ``[1, n]`` (int64) on a segment with the embedding, else hidden states ``[1, n, hidden]``.
        position: of the first of the n rows.
        cache: the session's KV on this segment; grows by n rows.
        logits: whether the last row's logits are wanted (segments with the head).
    """

    inputs: torch.Tensor
    position: int
    cache: SessionCache
    logits: bool


class Engine(Protocol):
    """Runs one segment.

    Attributes:
        name: as people read it.
        width: how many sessions may share the products of one step; 1 where a session's numbers would change by it.
    """

    name: str
    width: int

    def run(self, jobs: Sequence[Job]) -> list[torch.Tensor | None]:
        """One step of each of these sessions, ``width`` of them at most.

        Returns:
            Of each: hidden states ``[1, n, hidden]``; on a segment with the head the last row's logits ``[vocab]``, or
            None where they are not wanted.
        """
        ...
