"""What one generation asks for and what it gives."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import torch

from splitlm.core.errors import PromptError, UsageError
from splitlm.core.sampling import FinishReason, Sampling

SEED_BITS = 32
"""Of a drawn seed: short enough to be typed again, and exact in every reader of JSON."""


@dataclass(frozen=True)
class Request:
    """One generation, in token ids.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: end after so many.
        sampling: how tokens are chosen.
        eos_ids: tokens that end it; the ending token is given to the caller too.
        logits: whether each token comes with the logits it was chosen from (checks only: they travel).
        accept: called with each token on the event loop; returns why to end, or None. Must be quick.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int = 128
    sampling: Sampling = field(default_factory=Sampling)
    eos_ids: frozenset[int] = frozenset()
    logits: bool = False
    accept: Callable[[int], FinishReason | None] | None = None

    def check(self, context: int, vocab: int) -> None:
        """Refuse what the model cannot take.

        Raises:
            PromptError: no token, more tokens than the context holds, or an id outside the vocabulary.
            UsageError: no new token is asked for.
        """
        if not self.prompt:
            raise PromptError("The prompt gives no token", expected="at least one token", remedy="Write something")
        if len(self.prompt) > context:
            raise PromptError(
                f"The prompt has {len(self.prompt)} tokens",
                expected=f"at most {context}, the model's context",
                remedy="Shorten the prompt",
            )
        if not all(0 <= token < vocab for token in self.prompt):
            raise PromptError("The prompt holds a token id out of range", expected=f"ids from 0 to {vocab - 1}")
        if self.max_new_tokens < 1:
            raise UsageError(
                f"max-new-tokens is {self.max_new_tokens}", where="--max-new-tokens", expected="at least 1"
            )


def seeded(sampling: Sampling | None) -> Sampling:
    """These settings, None for greedy ones; with a drawn seed where they have none and need one, to be told later."""
    chosen = sampling or Sampling()
    if chosen.greedy or chosen.seed is not None:
        return chosen
    return msgspec.structs.replace(chosen, seed=secrets.randbits(SEED_BITS))


@dataclass(frozen=True)
class TokenOut:
    """One generated token. ``logits`` are ``[vocab]`` float32, where they were asked for."""

    token: int
    index: int
    finish: FinishReason | None = None
    logits: torch.Tensor | None = None
