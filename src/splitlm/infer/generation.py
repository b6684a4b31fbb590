"""What a generation gives to its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from splitlm.core.sampling import FinishReason


@dataclass
class Generation:
    """A finished generation.

    Attributes:
        text: without special tokens and stop strings.
        tokens: ids, the ending one included; ``logits`` one ``[vocab]`` tensor for each, where asked for.
        seed: with which sampling repeats it, given or drawn; None where decoding was greedy.
    """

    text: str
    tokens: list[int]
    finish: FinishReason
    prompt_tokens: int
    logits: list[torch.Tensor] = field(default_factory=list)
    seed: int | None = None
