"""Two runs of one model, compared token by token and logit by logit. Pure: numbers in, a verdict out.

The reference is fed the ring's own tokens (teacher forcing), so that every step is comparable, the ones after a
difference too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitlm.core.errors import CheckFailedError

BOUND = 5e-4
"""Largest |Δlogit| allowed in float32, where other kernels may sum in another order."""
ROUNDINGS = 16
"""The same in bfloat16 and float16, in units of the type's rounding step at the step's largest logit. It is coarse, and
there to keep the margin rule from excusing logits that are simply wrong: far enough apart, any tie looks close."""
_EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass(frozen=True)
class Run:
    """What one side generated: ``tokens[i]`` was chosen from ``logits[i]``, ``[vocab]``."""

    tokens: Sequence[int]
    logits: Sequence[torch.Tensor]


@dataclass(frozen=True)
class StepDelta:
    """One token on both sides.

    Attributes:
        index: counted from the first generated token.
        token: the ring's choice, and ``reference`` the other's.
        delta: largest |Δlogit|; infinite where one side is not finite and the other differs.
        limit: what ``delta`` may be.
        margin: between the reference's two largest logits.
        bit_equal: every logit has the same bits.
    """

    index: int
    token: int
    reference: int
    delta: float
    limit: float
    margin: float
    bit_equal: bool

    @property
    def same(self) -> bool:
        """Whether both sides chose the same token."""
        return self.token == self.reference

    @property
    def excused(self) -> bool:
        """The margin rule: the ids differ, and the reference's choice was closer than the logits are accurate."""
        return not self.same and self.delta <= self.limit and self.margin < 2 * self.delta

    @property
    def ok(self) -> bool:
        """Whether the step passes."""
        return self.delta <= self.limit and (self.same or self.excused)


@dataclass(frozen=True)
class Comparison:
    """The verdict on one prompt.

    Attributes:
        steps: every step that both sides made.
        counts: number of tokens of the ring and of the reference.
    """

    steps: tuple[StepDelta, ...]
    counts: tuple[int, int]

    @property
    def matches(self) -> int:
        """Number of equal ids."""
        return sum(step.same for step in self.steps)

    @property
    def delta(self) -> float:
        """Largest |Δlogit| of all steps."""
        return max((step.delta for step in self.steps), default=0.0)

    @property
    def margin(self) -> float:
        """Smallest top-2 margin of the reference."""
        return min((step.margin for step in self.steps), default=math.inf)

    @property
    def bit_equal(self) -> bool:
        """Whether both sides made as many tokens, the same ones, from logits with the same bits."""
        same = all(step.same and step.bit_equal for step in self.steps)
        return same and bool(self.steps) and self.counts[0] == self.counts[1]

    @property
    def excused(self) -> tuple[StepDelta, ...]:
        """Differing ids that the margin rule excuses."""
        return tuple(step for step in self.steps if step.excused)

    @property
    def first_bad(self) -> StepDelta | None:
        """The first step that fails."""
        return next((step for step in self.steps if not step.ok), None)

    @property
    def ok(self) -> bool:
        """Whether the two runs are equal under the rule."""
        return bool(self.steps) and self.first_bad is None and self.counts[0] == self.counts[1]

    @property
    def failure(self) -> str:
        """What is wrong, at which token, and what that means; empty when nothing is."""
        step = self.first_bad
        if step is None:
            if self.counts[0] != self.counts[1]:
                return f"the ring made {self.counts[0]} tokens and the reference {self.counts[1]}"
            return "" if self.steps else "no token was compared"
        delta = f"max |Δlogit| is {step.delta:.2g} (bound {step.limit:.2g})"
        ids = f"the ring chose {step.token} and the reference {step.reference} with a top-2 margin of {step.margin:.2g}"
        return f"at index {step.index} {'the ids agree' if step.same else ids}, and {delta}: {meaning(step)}"


def meaning(step: StepDelta) -> str:
    """Where to look for the cause of a failing step."""
    if not step.same and step.bit_equal:
        return "the logits are the same, so the sampling differs"
    if not math.isfinite(step.delta):
        return "the logits are not finite, so look for damaged weights or an overflow"
    if step.index == 0:
        return "the first token comes out of prefill, so look at the mask, or at rotary positions across a boundary"
    return "prefill was right, so look at a stage's KV, or at the position of a decode step"


def rule(dtype: str) -> str:
    """The rule that ``compare`` applies, in words."""
    bound = f"{BOUND:g}" if dtype not in _EPSILON else f"{ROUNDINGS} rounding steps of {dtype} at the largest logit"
    return f"ids equal (or the reference's top-2 margin below 2·|Δ|), and |Δlogit| at most {bound}"


def compare(ring: Run, reference: Run, dtype: str = "float32") -> Comparison:
    """Compare a ring's run with the reference's, which was fed the ring's tokens.

    Args:
        dtype: what both computed in.

    Raises:
        CheckFailedError: a side did not give one vector of logits per token, or the vocabularies differ.
    """
    for name, run in (("the ring", ring), ("the reference", reference)):
        if len(run.tokens) != len(run.logits):
            raise CheckFailedError(
                f"{name} gave {len(run.tokens)} tokens and logits of {len(run.logits)}",
                expected="logits of every token",
            )
    both = zip(ring.tokens, reference.tokens, ring.logits, reference.logits, strict=False)  # counts are compared apart
    steps = tuple(_step(i, *step, dtype) for i, step in enumerate(both))
    return Comparison(steps, (len(ring.tokens), len(reference.tokens)))


def _step(index: int, token: int, reference: int, ours: torch.Tensor, theirs: torch.Tensor, dtype: str) -> StepDelta:
    if ours.shape != theirs.shape or ours.dim() != 1:
        raise CheckFailedError(
            f"at index {index} the ring's logits have shape {list(ours.shape)}", expected=f"{list(theirs.shape)}"
        )
    # A float32 holds every bfloat16 and float16 exactly, so this changes no comparison.
    a, b = ours.float().contiguous(), theirs.float().contiguous()
    apart = (a - b).abs().masked_fill(a == b, 0.0)  # equal infinities have no difference
    delta = float(apart.nan_to_num(nan=math.inf).max())
    if bool(b.isnan().any() or a.isnan().any()):
        delta = math.inf
    largest = float(b[b.isfinite()].abs().max()) if bool(b.isfinite().any()) else 0.0
    limit = ROUNDINGS * _EPSILON[dtype] * largest if dtype in _EPSILON else BOUND
    best = torch.topk(b, min(2, len(b))).values
    margin = float(best[0] - best[1]) if len(b) > 1 else math.inf
    bits = math.isfinite(delta) and bool(torch.equal(a.view(torch.int32), b.view(torch.int32)))
    return StepDelta(index, token, reference, delta, limit, margin, bits)
