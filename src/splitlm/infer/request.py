"""What one generation asks for and what it gives."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import msgspec
import torch

from splitlm.core.errors import PromptError, UsageError
from splitlm.core.sampling import FinishReason, Sampling, shown, whole

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
        """Refuse what the model cannot take, and what no frame can carry: it would break the ring for all sessions.

        Raises:
            PromptError: no token, more tokens than the context holds, or an id outside the vocabulary.
            UsageError: no new token is asked for, or settings of another type.
        """
        if not self.prompt:
            raise PromptError("The prompt gives no token", expected="at least one token", remedy="Write something")
        if len(self.prompt) > context:
            raise PromptError(
                f"The prompt has {len(self.prompt)} tokens",
                expected=f"at most {context}, the model's context",
                remedy="Shorten the prompt",
            )
        if not all(type(token) is int and 0 <= token < vocab for token in self.prompt):
            raise PromptError("The prompt holds a token id out of range", expected=f"ids from 0 to {vocab - 1}")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise UsageError(
                f"max-new-tokens is {shown(self.max_new_tokens)}",
                where="--max-new-tokens",
                expected="a whole number of at least 1",
            )
        if type(self.sampling) is not Sampling or type(self.logits) is not bool:
            found = f"sampling is {shown(self.sampling)}, and logits {shown(self.logits)}"
            raise UsageError(found, expected="a splitlm.Sampling, and True or False")


def token_ids(prompt: object) -> list[int]:
    """A caller's token ids as plain integers: of a list, or of a one-dimensional array of numpy or torch.

    Raises:
        PromptError: it holds something else.
    """
    listed = getattr(prompt, "tolist", None)
    found = listed() if callable(listed) else prompt  # of an array at once, on whatever device it is
    if not isinstance(found, Iterable) or isinstance(prompt, str | bytes | bytearray | memoryview | Mapping | Set):
        raise _no_ids("is", prompt)
    ids: list[int] = []
    for item in found:
        token = whole(item)
        if token is None:
            raise _no_ids("holds", item)
        ids.append(token)
    return ids


def _no_ids(how: str, found: object) -> PromptError:
    return PromptError(
        f"The prompt {how} {shown(found)}, of type {type(found).__name__}",
        where="prompt",
        expected="a text, or a sequence of whole numbers: token ids",
    )


def counted(max_new_tokens: object) -> int:
    """A caller's number of new tokens as a plain integer, which ``Request.check`` is to judge.

    Raises:
        UsageError: it is no whole number.
    """
    count = whole(max_new_tokens)
    if count is None:
        raise UsageError(
            f"max-new-tokens is {shown(max_new_tokens)}",
            where="--max-new-tokens",
            expected="a whole number of at least 1",
        )
    return count


def stops(stop: object) -> Sequence[str]:
    """A caller's stop strings: one, several or, as None, none.

    Raises:
        UsageError: something else than text is among them.
    """
    given = (stop,) if isinstance(stop, str) else () if stop is None else stop
    texts = tuple(given) if isinstance(given, Iterable) else (stop,)
    if all(isinstance(text, str) for text in texts):
        return texts
    raise UsageError(f"stop is {shown(stop)}", where="--stop", expected="a text, or a sequence of texts")


def seeded(sampling: Sampling | None) -> Sampling:
    """These settings, None for greedy ones; with a drawn seed where they have none and need one, to be told later.

    Raises:
        UsageError: they are no ``Sampling``.
    """
    chosen = Sampling() if sampling is None else sampling
    if type(chosen) is not Sampling:
        raise UsageError(f"sampling is {shown(chosen)}", where="sampling", expected="a splitlm.Sampling")
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
