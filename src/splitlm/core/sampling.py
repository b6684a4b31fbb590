"""How the next token is chosen, and when a generation ends: settings only (arithmetic: ``model/sampling``)."""

from __future__ import annotations

from typing import Literal

import msgspec

from splitlm.core.errors import UsageError

FinishReason = Literal["eos", "stop", "length", "context", "cancelled"]
"""Why a generation ended: an end-of-sequence token, a stop string, the asked number of tokens, the model's context."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling settings of one session. ``temperature`` 0 is greedy, the only mode that is reproducible everywhere.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches p (nucleus; arXiv 1904.09751).
        min_p: drop tokens less probable than this share of the best one (arXiv 2407.01082).
        repetition_penalty: divide (or multiply, where negative) the logits of tokens already seen (arXiv 1909.05858).
        seed: of this session's own random generator; None draws one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        rules: list[tuple[str, float, bool, str]] = [
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "a number from 0 to 100"),
            ("top-k", self.top_k, self.top_k >= 0, "0 (off) or a positive number of tokens"),
            ("top-p", self.top_p, 0 < self.top_p <= 1, "a number above 0, at most 1"),
            ("min-p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1"),
            ("repetition-penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 100, "a positive number"),
            ("seed", self.seed or 0, self.seed is None or 0 <= self.seed < 2**63, "a non-negative 63-bit integer"),
        ]
        for name, value, good, expected in rules:
            if not good:
                raise UsageError(f"{name} is {value}", where=f"--{name}", expected=expected)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is taken."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the sampler must know the prompt's token ids."""
        return self.repetition_penalty != 1.0
