"""How the next token is chosen, and when a generation ends: settings only (arithmetic: ``model/sampling``)."""

from __future__ import annotations

import operator
from contextlib import suppress
from numbers import Real
from typing import Literal, SupportsIndex, cast

import msgspec

from splitlm.core.errors import UsageError

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a generation ended: an end-of-sequence token, a stop string, the asked number of tokens, the model's context."""
WIRE_INTEGERS = 2**63
"""Integers below this travel in frames, and fit torch's."""
SHOWN = 60
"""Characters of a wrong value that a message shows."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one session. ``temperature`` 0 is greedy, the only mode that is reproducible everywhere.

    Numbers of other types, such as numpy's, become plain ones.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (nucleus; arXiv 1904.09751).
        min_p: drop tokens less probable than this share of the best one (arXiv 2407.01082).
        repetition_penalty: divide (or multiply, where negative) the logits of tokens already seen (arXiv 1909.05858).
        seed: of this session's own random generator; None draws one.

    Raises:
        UsageError: a value out of range, or of a type that is no such number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        heat, top_p, min_p = real(self.temperature), real(self.top_p), real(self.min_p)
        penalty, top_k = real(self.repetition_penalty), whole(self.top_k)
        seed = None if self.seed is None else whole(self.seed)
        seeded = self.seed is None or (seed is not None and 0 <= seed < WIRE_INTEGERS)
        most = top_k is not None and 0 <= top_k < WIRE_INTEGERS
        rules: list[tuple[str, object, bool, str]] = [
            ("temperature", heat, heat is not None and 0 <= heat <= 100, "a number from 0 to 100"),
            ("top_k", top_k, most, "0 (off) or a positive number of tokens, of at most 63 bits"),
            ("top_p", top_p, top_p is not None and 0 < top_p <= 1, "a number above 0, at most 1"),
            ("min_p", min_p, min_p is not None and 0 <= min_p <= 1, "a number from 0 to 1"),
            ("repetition_penalty", penalty, penalty is not None and 0 < penalty <= 100, "a positive number"),
            ("seed", seed, seeded, "a non-negative 63-bit integer"),
        ]
        for field, value, good, expected in rules:
            if not good:
                name = field.replace("_", "-")
                raise UsageError(f"{name} is {shown(getattr(self, field))}", where=f"--{name}", expected=expected)
            msgspec.structs.force_setattr(self, field, value)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the prompt's token ids."""
        return self.repetition_penalty != 1.0


def whole(value: object) -> int | None:
    """A caller's integer of whatever type as a plain one; None where it is none. A truth value is none."""
    if type(value) is int:
        return value
    if not isinstance(value, bool):
        with suppress(TypeError, ValueError, RuntimeError):  # such as a tensor of several numbers, or of fractions
            return operator.index(cast(SupportsIndex, value))
    return None


def real(value: object) -> float | None:
    """A caller's number of whatever type as a plain float; None where it is none. A truth value is none."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):
            return float(value)
    return None


def shown(value: object) -> str:
    """A wrong value for a message: not all of a long one."""
    try:
        text = str(value) if isinstance(value, Real) else repr(value)
    except ValueError:  # Python writes no integer of thousands of digits
        text = "a number of thousands of digits"
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"
